"""An engine on a simulated GPU, or on a real one without a model: the storms of `simulated_gpu`."""
