"""Both forms of surgery on a GPU: exact, trainable, movable, and back from a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from zoo_models import ZOO

import prunus
from prunus.surgery import Inputs, outputs
from prunus.surgery.verify import max_rel_diff

pytestmark = pytest.mark.gpu
NAMES = ("resnet18", "mobilenet_v3", "unet_groupnorm", "vit", "swin", "hf_bert", "hf_llama", "hf_t5", "torch_encoder",
         "conv_lstm")  # fmt: skip


def on(device: str, value: Any) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


@pytest.mark.parametrize("form", ["auto", "graph"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu(name: str, form: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model, example = ZOO[name].make().cuda(), on("cuda", ZOO[name].inputs())
    units = ("structured", "branches") if form == "graph" else "structured"
    gated = prunus.gate(model, example, units=units, form=form)
    torch.manual_seed(1)
    with torch.no_grad():
        gated.log_alpha.copy_(2 * torch.randn(gated.units))
    small, receipt = prunus.shrink(gated, example, seconds=0)
    assert receipt["exactness"]["ok"]
    assert form == "auto" or receipt["form"] == "graph"
    inputs = Inputs.of(example)
    small.train()
    sum(o.float().square().mean() for o in _run(small, inputs) if o.is_floating_point()).backward()
    assert any(p.grad is not None for p in small.parameters())
    found = outputs(small, inputs)
    prunus.save(small.eval(), tmp_path / "small.safetensors")
    back = prunus.load(ZOO[name].make().cuda().eval(), tmp_path / "small.safetensors")
    assert max_rel_diff(found, outputs(back, inputs)) < 1e-5
    moved = outputs(small.cpu(), Inputs.of(on("cpu", example)))
    assert max_rel_diff([o.cpu() for o in found], moved) < 1e-4


def _run(module: torch.nn.Module, inputs: Inputs) -> list[Tensor]:
    result = module(*inputs.args, **inputs.kwargs)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
