"""The residual streams of LocalTransformer (hyper-connections): between its layers, at both ends, and step by step."""
