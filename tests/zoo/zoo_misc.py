"""Recurrent, tied, shared and gated networks, an operation that nobody knows, and a branch on the data."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_random import VOCAB, seeded


class ConvRecurrent(nn.Module):
    """Convolutions over a spectrogram, then a recurrence over its columns."""

    def __init__(self, recurrence: type[nn.LSTM] | type[nn.GRU], layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d((2, 1)),
            nn.Conv2d(8, 8, (4, 3), padding=(0, 1)),
            nn.ReLU(inplace=True),
        )
        self.rnn = recurrence(8, 12, num_layers=layers, batch_first=True, bidirectional=bidirectional)
        self.fc = nn.Linear(24 if bidirectional else 12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = x.squeeze(2).permute(0, 2, 1)  # batch, columns, maps
        x, _ = self.rnn(x)
        return self.fc(x)


class SharedConv(nn.Module):
    """One block of convolutions applied twice, with a residual in between."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(channels, 10, 3, padding=1, bias=False),
            nn.BatchNorm2d(10),
            nn.ReLU(),
            nn.Conv2d(10, channels, 3, padding=1),
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for _ in range(2):
            x = F.relu(x + self.block(x))
        return self.head(x.mean(dim=(-2, -1)))


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(24, 16)
        self.enc2 = nn.Linear(16, 8)
        self.bias2 = nn.Parameter(torch.zeros(16))
        self.bias1 = nn.Parameter(torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.enc(x))
        code = torch.sigmoid(self.enc2(h))
        h = torch.sigmoid(F.linear(code, self.enc2.weight.t(), self.bias2))
        return F.linear(h, self.enc.weight.t()) + self.bias1


class TiedLanguageModel(nn.Module):
    """The next word, by a window over the words before; the decoder's weight is the embedding's."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.conv = nn.Conv1d(dim, 32, kernel_size=3)
        self.fc = nn.Linear(32, dim)
        self.decoder = nn.Linear(dim, VOCAB)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        x = F.relu(self.conv(F.pad(x, (2, 0))))
        x = torch.tanh(self.fc(x.transpose(1, 2)))
        return self.decoder(x)


@torch.library.custom_op("zoo_tests::mirror", mutates_args=())
def mirror(x: Tensor) -> Tensor:
    return x.flip(1) + 0.5 * x


@mirror.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _back(_: Any, gradient: Tensor) -> Tensor:
    return gradient.flip(1) + 0.5 * gradient


mirror.register_autograd(_back)


class CustomOp(nn.Module):
    """An operation that mixes channels in a way no rule can know, with known layers before, beside and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 12, 3, padding=1)
        self.fc = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = mirror(self.conv2(x))
        x = F.relu(self.conv3(x))
        return self.fc(F.adaptive_max_pool2d(x, 1).flatten(1))


class ControlFlow(nn.Module):
    """What is computed depends on the values: there is no one graph of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 12)
        self.fc2 = nn.Linear(12, 12)
        self.fc3 = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        if x.sum() > 0:
            x = self.fc2(F.relu(x))
        return self.fc3(F.relu(x))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * hidden)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(x1) * x2)


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(12, 24)
        self.ffn1 = SwiGLU(24, 20)
        self.ffn2 = SwiGLU(24, 16)
        self.glu = nn.Sequential(nn.Linear(24, 28), nn.GLU())
        self.out = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        x = x + self.ffn1(x)
        x = x + self.ffn2(x)
        return self.out(self.glu(x))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float() if x.dtype is torch.float16 else x).type_as(x) * self.weight


class RMSNet(nn.Module):
    """A residual stream of words, normalised by its root mean square before each branch."""

    def __init__(self, dim: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.norms = nn.ModuleList([RMSNorm(dim) for _ in range(depth)])
        self.w1 = nn.ModuleList([nn.Linear(dim, 32, bias=False) for _ in range(depth)])
        self.w2 = nn.ModuleList([nn.Linear(32, dim, bias=False) for _ in range(depth)])
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for norm, w1, w2 in zip(self.norms, self.w1, self.w2, strict=True):
            h = h + w2(F.silu(w1(norm(h))))
        return self.output(self.norm(h))


@seeded()
def conv_lstm() -> nn.Module:
    return ConvRecurrent(nn.LSTM, 1, bidirectional=False)


@seeded()
def conv_gru() -> nn.Module:
    return ConvRecurrent(nn.GRU, 2, bidirectional=True)


@seeded()
def shared_module() -> nn.Module:
    return SharedConv()


@seeded()
def tied_autoencoder() -> nn.Module:
    return TiedAutoencoder()


@seeded()
def tied_lm() -> nn.Module:
    return TiedLanguageModel()


@seeded()
def custom_op() -> nn.Module:
    return CustomOp()


@seeded()
def control_flow() -> nn.Module:
    return ControlFlow()


@seeded()
def glu_mlp() -> nn.Module:
    return GatedMlp()


@seeded()
def rms_net() -> nn.Module:
    return RMSNet()
