"""Let a model on a Triton server go on from a text: `python client.py http://localhost:8000 NAME_stream "def "`.

A model of 256 tokens reads and writes bytes. The prompt goes in one request, and each further one brings 32 tokens.
"""

import json
import sys
import urllib.request


def ask(url: str, model: str, tokens: list[int], new: int, **parameters: object) -> list[int]:
    def tensor(name: str, datatype: str, values: list[int]) -> dict[str, object]:
        return {"name": name, "datatype": datatype, "shape": [1, len(values)], "data": values}

    body = {
        "inputs": [tensor("tokens", "INT64", tokens), tensor("new_tokens", "INT32", [new])],
        "outputs": [{"name": "generated"}],
        "parameters": parameters,
    }
    request = urllib.request.Request(f"{url}/v2/models/{model}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["outputs"][0]["data"]


def main(url: str, model: str, text: str) -> None:
    tokens = list(text.encode())
    for piece in range(4):
        last = {"sequence_end": True} if piece == 3 else {}
        new = ask(url, model, tokens, 32, sequence_id=1, sequence_start=piece == 0, **last)
        print(bytes(new).decode("utf-8", "replace"), end="", flush=True)
        tokens = new[-1:]


if __name__ == "__main__":
    main(*sys.argv[1:])
