"""Modules with local attention and what else works along time: some can run step by step, others cannot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from local_attention import LocalAttention, LocalMHA, LocalTransformer
from torch import Tensor, nn

TOKENS, FRAMES, CHANNELS = ["tokens:int64:[1,seq=40]"], ["x:float32:[1,seq=40,16]"], ["x:float32:[1,16,seq=40]"]
WIDTH = 16


def attention(causal: bool = True) -> LocalMHA:
    return LocalMHA(dim=WIDTH, window_size=5, dim_head=8, heads=2, causal=causal)


class Everything(nn.Module):
    """Embeddings of tokens and positions, convolutions padded in two ways, BatchNorm, LSTM, GRU, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, WIDTH), nn.Embedding(128, WIDTH)
        self.norm, self.batch_norm, self.drop = nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.cut, self.padded = nn.Conv1d(WIDTH, WIDTH, 3, padding=2), nn.Conv1d(WIDTH, WIDTH, 3)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attn, self.head = attention(), nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = x + self.cut(x.transpose(1, 2))[..., :-2].transpose(1, 2)
        x = x + F.relu(self.padded(F.pad(x.mT, (2, 0)))).mT
        x = self.gru(self.lstm(self.batch_norm(x.mT).mT)[0])[0]
        x = x + self.attn(self.drop(x))
        x = F.gelu(self.norm(x)).view(x.shape[0], x.shape[1], 2, 8).permute(0, 2, 1, 3).transpose(1, 2).flatten(2)
        return {"logits": self.head(x) * torch.sigmoid(x.chunk(2, -1)[0].sum(-1, keepdim=True))}


class TokenShift(nn.Module):
    """RWKV's mix of a position with the one before, and a mean of all positions so far."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.mix, self.linear = (
            nn.ZeroPad2d((0, 0, 1, -1)),
            nn.Parameter(torch.rand(WIDTH)),
            nn.Linear(16, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.linear(x * self.mix + self.shift(x) * (1 - self.mix))
        return mixed.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Bare(nn.Module):
    """Attention by itself, block-local and with xpos."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn = LocalAttention(
            dim=8, window_size=6, causal=True, autopad=True, exact_windowsize=False, use_xpos=True, xpos_scale_base=20
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.reshape(batch, length, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.attn(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)


class Dilated(nn.Module):
    """Grouped and dilated convolutions of channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, dilation=d, groups=4) for d in (1, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + F.relu(conv(F.pad(x, (2 * conv.dilation[0], 0))))
        return x


class TwoRows(nn.Module):
    """Two sequences, and a recurrent layer that has time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attn = nn.LSTM(WIDTH, WIDTH), attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(self.lstm(x.transpose(0, 1))[0].transpose(0, 1))


class LearnedStart(nn.Module):
    """A recurrent layer that begins with learned numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.gru = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x, self.start.expand(-1, x.shape[0], -1).contiguous())[0]


class BiasOfPadding(nn.Module):
    """What stands before the first position is a linear layer's bias, not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(WIDTH, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.linear(F.pad(x, (0, 0, 2, 0))).mT).mT


class Transformer(nn.Module):
    """A whole LocalTransformer, with its residual streams."""

    def __init__(self) -> None:
        super().__init__()
        self.body = LocalTransformer(
            num_tokens=50,
            max_seq_len=64,
            dim=WIDTH,
            depth=2,
            dim_head=8,
            heads=2,
            local_attn_window_size=5,
            causal=True,
        )
        self.head = nn.Linear(50, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens))


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...nd,dhe->...nhe", x, self.matrix).flatten(2)


class Gated(nn.Module):
    """A convolution with weight_norm, a gate, and a plain recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(WIDTH, WIDTH, 4))
        self.rnn = nn.RNN(WIDTH, WIDTH, batch_first=True, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(F.glu(torch.cat([self.conv(F.pad(x.mT, (3, 0))).mT, x], -1)))[0]


class Refused(nn.Module):
    """Modules that a step file cannot compute, by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, 3 * WIDTH)
        self.attn, self.looks_ahead = attention(), attention(causal=False)
        self.gru, self.both = nn.GRU(16, 16, batch_first=True), nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.same, self.group = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return getattr(self, f"_{self.kind}")(x)

    def _mean(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    def _bidirectional(self, x: Tensor) -> Tensor:
        return self.both(x)[0]

    def _last_state(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[1][-1][:, None]

    def _padding(self, x: Tensor) -> Tensor:
        return x + self.same(x.mT).mT

    def _not_causal(self, x: Tensor) -> Tensor:
        return self.looks_ahead(x)

    def _masked(self, x: Tensor) -> Tensor:
        return self.attn(x, mask=x[..., 0] > 0)

    def _dense(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.linear(x).chunk(3, -1), is_causal=True)

    def _scores(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x

    def _group_norm(self, x: Tensor) -> Tensor:
        return self.group(x.mT).mT

    def _reversed(self, x: Tensor) -> Tensor:
        return x.flip(1)

    def _length(self, x: Tensor) -> Tensor:
        return x / x.shape[1]

    def _first(self, x: Tensor) -> Tensor:
        return x + x[:, :1]

    def _later(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 1))[:, 1:]

    def _from_the_end(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1]).flip(0)[:, None]

    def _two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu(), x.tanh()
