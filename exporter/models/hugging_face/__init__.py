"""Hugging Face models: PreTrainedModels whose attention goes through transformers' AttentionInterface."""
