"""Make realistic inputs for checks: text through the model's own tokenizer, or tokens drawn by rank."""
