"""An engine on a simulated GPU, or on a real GPU without a model, for `simulated_gpu`."""
