"""Long prompts served cold, from CPU memory, and by another process."""
