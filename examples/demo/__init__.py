"""The main job, shown: long prompts served cold, from CPU memory, and by another process."""
