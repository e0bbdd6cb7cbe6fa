"""Models: the configuration, the stack of steps, and the Hugging Face models with their heads."""
