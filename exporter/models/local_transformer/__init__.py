"""`LocalTransformer`: embeddings, layers, logits."""
