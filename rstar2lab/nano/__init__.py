"""A world small enough to train on two CPU cores: tasks, cold-start corpus, tokenizer, Qwen3 model."""
