"""A world small enough for two CPU cores: tasks, cold-start corpus, tokenizer, model."""
