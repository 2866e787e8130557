"""Run an exported model over a corpus with Ray Data: `python ray_corpus.py model.onnx --workers 2`.

One process a worker, one thread each, and the model opened once in each. On a cluster the file must be at the same
path on every machine, or in the working directory that Ray distributes.
"""

import argparse
import json
import time

import numpy as np
import ray


class Model:
    """A worker: opens the model, then answers batches of rows."""

    def __init__(self, path: str) -> None:
        from localattn import load

        self.session = load(path, threads=1)
        self.batch = self.session.inputs[0].shape[0]

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the bits per token of each row."""
        tokens = rows["tokens"]
        step = self.batch if isinstance(self.batch, int) else len(tokens)
        pieces = [tokens[at : at + step] for at in range(0, len(tokens), step)]
        logits = np.concatenate([self.session.run({"tokens": piece})["logits"] for piece in pieces])
        shifted = logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True)
        own = np.take_along_axis(shifted, tokens[:, 1:, None], -1)[..., 0]
        nats = np.log(np.exp(shifted).sum(-1)) - own
        return {"row": rows["row"], "bits": nats.mean(-1) / np.log(2)}


def bits_per_token(model: str, tokens: np.ndarray, workers: int, batch: int = 8) -> tuple[np.ndarray, float]:
    """Return the bits per token of each row of `tokens` [rows, N], and the seconds it took after the start."""
    rows = ray.data.from_items([{"row": row, "tokens": each} for row, each in enumerate(tokens)])
    blocks = rows.repartition(max(1, len(tokens) // batch)).materialize()
    start = time.perf_counter()
    found = blocks.map_batches(
        Model, fn_constructor_args=(model,), batch_size=batch, num_cpus=1, concurrency=workers
    ).to_pandas()
    return found.sort_values("row")["bits"].to_numpy(), time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
    corpus = np.random.default_rng(0).integers(0, 256, (options.rows, options.length))
    bits, seconds = bits_per_token(options.model, corpus, options.workers)
    print(json.dumps({"bits": bits.tolist(), "seconds": seconds, "rows": len(bits)}))
