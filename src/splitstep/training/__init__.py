"""The thin layer over the Hugging Face Trainer: run folders, checkpoints that count when complete, schedules."""
