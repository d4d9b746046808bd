"""Layers of PyTorch, all but attention."""

from math import sqrt

import torch
from torch import nn

from prunus.surgery.known.kept import Kept, known, own_weight, rescaled_weight


@known(nn.Linear)
def linear(module: nn.Linear, kept: Kept) -> None:
    """y = x W^T."""
    module.out_features, module.in_features = module.weight.shape


@known(nn.Bilinear)
def bilinear(module: nn.Bilinear, kept: Kept) -> None:
    """y = x1^T W x2."""
    module.out_features, module.in1_features, module.in2_features = module.weight.shape


@known(nn.modules.conv._ConvNd)
def convolution(module: nn.modules.conv._ConvNd, kept: Kept) -> None:
    """Groups go whole; a transposed convolution's weight has its inputs first."""
    groups = kept.groups()
    if groups is not None:
        module.groups = groups
    one, two = module.weight.shape[:2]
    if module.transposed:
        module.in_channels, module.out_channels = one, two * module.groups
    else:
        module.out_channels, module.in_channels = one, two * module.groups


@known(nn.modules.batchnorm._NormBase)
def batch_norm(module: nn.modules.batchnorm._NormBase, kept: Kept) -> None:
    """Batch norms and instance norms; one without any tensors remembers a size that only warns."""
    own = module.weight if module.weight is not None else module.running_mean
    if own is not None:
        module.num_features = own.shape[0]


@known(nn.GroupNorm)
def group_norm(module: nn.GroupNorm, kept: Kept) -> None:
    """Whole groups go."""
    groups = kept.groups()
    if groups is not None:
        module.num_channels = module.num_channels // module.num_groups * groups
        module.num_groups = groups


@known(nn.ChannelShuffle)
def channel_shuffle(module: nn.ChannelShuffle, kept: Kept) -> None:
    """(groups x channels) become (channels x groups), whichever of them go."""
    groups = kept.groups()
    if groups is not None:
        module.groups = groups


@known(nn.LayerNorm)
def layer_norm(module: nn.LayerNorm, kept: Kept) -> None:
    """The shape of its weight; what it normalises over cannot shrink, but dimensions beside it may be among these."""
    if module.weight is not None:
        module.normalized_shape = tuple(module.weight.shape)


@known(nn.RMSNorm)
def rms_norm(module: nn.RMSNorm, kept: Kept) -> None:
    """What is gone was zero: sqrt(S/D + e) = sqrt(K/D) sqrt(S/K + e D/K), for D units of which K stay, S their sum.

    So the weight takes sqrt(D/K) and eps D/K.
    """
    weight = own_weight(module)
    if weight is None:
        return
    whole, left = torch.Size(module.normalized_shape).numel(), weight.numel()
    if left < whole:
        eps = torch.finfo(weight.dtype).eps if module.eps is None else module.eps
        module.eps = eps * whole / left
        module.normalized_shape = tuple(weight.shape)
        rescaled_weight(module, kept, sqrt(whole / left))


@known(nn.Embedding, nn.EmbeddingBag)
def embedding(module: nn.Embedding | nn.EmbeddingBag, kept: Kept) -> None:
    """Columns are features; rows stay."""
    module.num_embeddings, module.embedding_dim = module.weight.shape


@known(nn.PReLU)
def prelu(module: nn.PReLU, kept: Kept) -> None:
    """A slope a channel."""
    module.num_parameters = module.weight.shape[0]


@known(nn.RNNBase)
def recurrent(module: nn.RNNBase, kept: Kept) -> None:
    """LSTM, GRU and RNN: what they read may shrink."""
    module.input_size = module.weight_ih_l0.shape[1]  # type: ignore[index, assignment]
