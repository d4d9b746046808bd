"""The graph form: a plain module that trains, moves, copies and is exported as the model it was made from."""

import copy
import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from model_zoo import Net, images, residual, vectors
from safetensors import safe_open
from test_artefact import at, forge, paths_into, put
from torch import Tensor, nn
from torch.nn import functional as F

import prunus
from prunus.axes import Graph, Keep
from prunus.errors import ArtefactError, InexactSurgery, ModelError, PrunusWarning
from prunus.graph import analyse
from prunus.surgery import Exported, Inputs, Program, mask_sites, slice_model
from prunus.surgery.artefact import plan_of
from prunus.surgery.verify import max_rel_diff, outputs


class Literal(nn.Module):
    """A view that holds its sizes, batch norm, dropout and an option."""

    def __init__(self, maps: int = 8) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.bn = nn.Conv2d(3, maps, 3), nn.BatchNorm2d(maps)
        self.drop = nn.Dropout(0.4)
        self.fc1, self.fc2 = nn.Linear(maps * 36, 12), nn.Linear(12, 4)
        nn.init.normal_(self.bn.running_mean)
        nn.init.uniform_(self.bn.running_var, 0.5, 2)

    def forward(self, x: Tensor, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
        x = F.relu(self.bn(self.conv(x))).view(-1, self.bn.num_features * 36)
        x = self.fc2(F.dropout(self.drop(F.relu(self.fc1(x))), 0.2, training=self.training)) * scale
        return x if shift is None else x + shift


def plain() -> nn.Module:
    """The same kinds of layers in code that holds no sizes, to compare with what its own class does."""
    model = residual()
    model.drop = nn.Dropout2d(0.3)  # type: ignore[assignment]
    for norm in (model.bn0, model.bn1, model.bn2):
        nn.init.normal_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2)
    forward = model.function
    model.function = lambda m, x: F.dropout(forward(m, m.drop(x)), 0.2, m.training)
    return model


def about_half(graph: Graph, seed: int = 0) -> Keep:
    generator = torch.Generator().manual_seed(seed)
    units = {}
    for name, size in graph.sizes.items():
        units[name] = torch.rand(size, generator=generator) < 0.5
        units[name][int(torch.randint(size, (1,), generator=generator))] = True
        if size > 1 and bool(units[name].all()):
            units[name][0] = False
    return Keep(graph, units).closed()


def programmed(model: nn.Module, example: Any, **options: Any) -> tuple[Program, nn.Module, dict[str, Tensor]]:
    """The program, the module sliced in the model's own class, and the dense weights masked at their sites."""
    inputs = Inputs.of(example)
    graph = analyse(model, inputs.args, inputs.kwargs, **options)
    keep = about_half(graph)
    masked = mask_sites(graph, keep, dict(model.named_parameters()) | dict(model.named_buffers()))
    small = slice_model(model, graph, keep)
    program = Exported(model, inputs).shrunk(graph, keep, slice_model(model, graph, keep, form="graph"))
    program.prunus_plan = plan_of(graph, keep, "graph", inputs)  # type: ignore[assignment]
    assert sum(p.numel() for p in program.parameters()) < sum(p.numel() for p in model.parameters())
    return program, small, masked


def seeded_call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    return model(*args, **kwargs)


# ---- what it is ------------------------------------------------------------------------------------------------------


def test_it_has_the_models_own_keys_in_their_order() -> None:
    model = Literal()
    model.register_buffer("passing", torch.ones(3), persistent=False)
    program, small, _ = programmed(model, images(batch=2)(), units="groups")
    for ours, its in (
        (model.state_dict(), program.state_dict()),
        (dict(model.named_parameters()), dict(program.named_parameters())),
        (dict(model.named_buffers()), dict(program.named_buffers())),
        (dict(model.named_modules()), dict(program.named_modules())),
    ):
        assert [key for key in its if not key.startswith("constant_")] == list(ours)
    for (key, one), two in zip(small.state_dict().items(), program.state_dict().values(), strict=True):
        assert torch.equal(one, two), key


def test_it_takes_a_state_dict() -> None:
    model = Literal()
    program, _, _ = programmed(model, images(batch=2)())
    other = copy.deepcopy(program)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    x = images(batch=2)()[0]
    assert not torch.equal(program(x), other(x))
    other.load_state_dict(program.state_dict())
    assert torch.equal(program.eval()(x), other.eval()(x))


@pytest.mark.parametrize("training", [True, False])
def test_its_mode_is_the_models(training: bool) -> None:
    program, _, _ = programmed(Literal().train(training), images(batch=2)())
    assert {module.training for module in program.modules()} == {training}
    assert program.train(not training) is program
    assert {module.training for module in program.modules()} == {not training}


def test_constants_of_the_code_are_no_part_of_its_state() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu()) * torch.tensor([1.0, 2, 3, 4]), a=nn.Linear(6, 8), b=nn.Linear(8, 4))
    program, small, _ = programmed(net, vectors()())
    assert list(program.state_dict()) == list(net.state_dict())
    assert torch.equal(program(*vectors()()), small(*vectors()()))


def test_parameters_that_do_not_train_stay_so() -> None:
    model = Literal()
    model.conv.weight.requires_grad_(False)
    program, _, _ = programmed(model, images(batch=2)())
    assert [p.requires_grad for p in program.parameters()] == [p.requires_grad for p in model.parameters()]


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.out = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, words: Tensor) -> Tensor:
            return self.out(torch.tanh(self.mix(self.embed(words).view(-1, 8))))

    model, words = Tied(), torch.randint(0, 11, (3, 5))
    program, _, masked = programmed(model, words)
    assert program.get_parameter("out.weight") is program.get_parameter("embed.weight")
    assert len(list(program.parameters())) == 3
    assert max_rel_diff(outputs(model, Inputs.of(words), masked), [program(words)]) < 1e-6
    for moved in (copy.deepcopy(program), copy.deepcopy(program).double()):
        assert moved.get_parameter("out.weight") is moved.get_parameter("embed.weight")
    program(words).sum().backward()
    assert program.get_parameter("embed.weight").grad is not None


def test_a_graph_of_another_model_is_refused() -> None:
    one, two = Literal(), Literal()
    two.forward = lambda x: two.fc2(F.relu(two.fc1(two.bn(two.conv(x)).flatten(1)).softmax(-1)))  # type: ignore[assignment]
    graph = analyse(one, images(batch=2)())
    keep = about_half(graph)
    with pytest.raises(InexactSurgery, match="says something else of"):
        Exported(two, Inputs.of(images(batch=2)())).shrunk(graph, keep, slice_model(one, graph, keep))


def test_what_the_code_computes_in_vain_costs_what_was_said() -> None:
    """A layer whose result nobody uses: what is counted before is what is counted after."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.a(x)).view(-1, 8)
        m.spare(x)
        return m.b(x)

    net = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4), spare=nn.Linear(8, 5))
    gated = prunus.gate(net, *vectors()(), units="groups", rescale=False)
    with torch.no_grad():
        gated.log_alpha.copy_(torch.tensor([3.0, -4, 3, -4, -4, 3, 3, -4]))
    _, receipt = prunus.shrink(gated, *vectors()(), batches=())
    assert receipt["form"] == "graph"
    assert receipt["deployed"] | {"latency_ms": {}} == gated.cost.of(gated.keep()) | {"latency_ms": {}}


# ---- training --------------------------------------------------------------------------------------------------------


def test_it_trains_as_its_own_class_does() -> None:
    """Outputs, gradients and running statistics, step by step, with dropout drawing the same."""
    model = plain().train()
    program, small, _ = programmed(model, images(batch=4)())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (program, small)]
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        found = [seeded_call(one, x) for one in (program, small)]
        assert max_rel_diff([found[1]], [found[0]]) < 1e-5
        for result, optimizer in zip(found, optimizers, strict=True):
            optimizer.zero_grad()
            result.square().sum().backward()
            optimizer.step()
        for (name, one), two in zip(small.named_parameters(), program.parameters(), strict=True):
            assert max_rel_diff([one.grad], [two.grad]) < 1e-3, name  # type: ignore[list-item]
            assert max_rel_diff([one], [two]) < 1e-4, name
    for name, buffer in small.named_buffers():
        if buffer.is_floating_point():
            assert max_rel_diff([buffer], [program.get_buffer(name)]) < 1e-5, name
    x = torch.randn(4, 3, 8, 8, generator=generator)
    assert max_rel_diff([small.eval()(x)], [program.eval()(x)]) < 1e-4
    assert torch.equal(program(x), program(x))


def test_batch_norm_counts_its_batches_as_its_own_class_does() -> None:
    program, small, _ = programmed(plain().train(), images(batch=4)())
    for model in (program, small):
        model(*images(batch=4)())
    assert small.get_buffer("bn0.num_batches_tracked") == 1
    assert program.get_buffer("bn0.num_batches_tracked") == 1


TRAINS = {  # layers that do something else in training
    "dropout": lambda: nn.Dropout(0.5),
    "dropout of whole maps": lambda: nn.Dropout2d(0.5),
    "alpha dropout": lambda: nn.AlphaDropout(0.5),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.5),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "batch norm without parameters": lambda: nn.BatchNorm2d(8, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(8),
    "instance norm with statistics": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "randomised relu": lambda: nn.RReLU(0.1, 0.9),
}


@pytest.mark.parametrize("name", TRAINS)
def test_what_a_layer_does_in_training_it_does_in_a_program(name: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), TRAINS[name](), nn.Conv2d(8, 5, 1), nn.ReLU(), nn.Conv2d(5, 2, 1))
    x = images(batch=3)()[0]
    program, small, _ = programmed(model.eval(), x)
    assert max_rel_diff([small.eval()(x)], [program(x)]) < 1e-6
    for _ in range(2):
        assert max_rel_diff([seeded_call(small.train(), x)], [seeded_call(program.train(), x)]) < 1e-6
    assert max_rel_diff([small.eval()(x)], [program.eval()(x)]) < 1e-6


def test_training_that_cannot_be_exported_is_said_when_it_is_tried() -> None:
    """A batch norm that averages all batches asks how many there were: a branch on a tensor's value."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.Conv2d(8, 2, 1)).eval()
    x = images(batch=3)()[0]
    program, small, _ = programmed(model, x)
    assert max_rel_diff([small.eval()(x)], [program(x)]) < 1e-6
    with pytest.warns(PrunusWarning, match="training mode could not be exported"):
        program.train()(x).sum().backward()


@pytest.mark.parametrize(
    "dropout", [F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout]
)
def test_what_is_read_beside_dropout_is_not_dropped(dropout: Any) -> None:
    """In evaluation mode some of these return the very tensor that they take."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.c((m.b(dropout(h, 0.5, m.training)) + h).flatten(1))

    layer = {F.dropout1d: nn.Conv1d, F.dropout3d: nn.Conv3d}.get(dropout, nn.Conv2d)
    net = Net(forward, a=layer(3, 8, 1), b=layer(8, 8, 1), c=nn.Linear(8 * 2 ** (layer(1, 1, 1).weight.dim() - 2), 4))
    x = torch.randn(2, 3, *[2] * (net.a.weight.dim() - 2))
    program, small, _ = programmed(net.eval(), x)
    assert max_rel_diff([small.eval()(x)], [program(x)]) < 1e-6
    assert max_rel_diff([seeded_call(small.train(), x)], [seeded_call(program.train(), x)]) < 1e-6


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrences_drop_out_between_their_layers_in_training(layer: Any) -> None:
    rnn = layer(8, 5, num_layers=2, dropout=0.9, batch_first=True)
    model = Net(lambda m, x: m.o(m.r(m.a(x))[0]), a=nn.Linear(6, 8), r=rnn, o=nn.Linear(5, 3)).eval()
    x = torch.randn(2, 7, 6)
    program, _, masked = programmed(model, x)
    assert max_rel_diff(outputs(model, Inputs.of(x), masked), [program(x)]) < 1e-6
    program.train()
    torch.manual_seed(0)
    assert not torch.equal(program(x), program(x))


def test_attention_drops_out_in_training() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(6, 8), nn.Linear(8, 3)
            self.m = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.o(self.m(x, x, x, need_weights=False)[0])

    program, _, _ = programmed(Attending().eval(), torch.randn(2, 5, 6))
    x = torch.randn(2, 5, 6)
    program.train()
    torch.manual_seed(0)
    assert not torch.equal(program(x), program(x))


def test_what_gets_no_gradient_in_the_model_gets_none() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = F.relu(m.a(x)).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        return m.c(F.relu(m.b(x)))

    model = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 7), c=nn.Linear(7, 4))
    x = vectors()()[0]
    program, _, masked = programmed(model, x)
    assert max_rel_diff(outputs(model, Inputs.of(x), masked), [program(x)]) < 1e-6
    program(x).sum().backward()
    assert [name for name, p in program.named_parameters() if p.grad is None] == ["a.weight", "a.bias"]


# ---- copying and moving ----------------------------------------------------------------------------------------------


def test_a_copy_is_another_model() -> None:
    program, _, _ = programmed(Literal().eval(), images(batch=2)())
    x = images(batch=2)()[0]
    before = program(x)
    other = copy.deepcopy(program)
    assert torch.equal(other(x), before)
    other.train()
    assert not torch.equal(seeded_call(other, x), before)
    assert torch.equal(program(x), before)
    other.eval()
    with torch.no_grad():
        other.get_parameter("fc2.bias").add_(1)
    assert torch.equal(program(x), before)
    again = copy.deepcopy(program.train())
    assert again.training
    assert torch.equal(seeded_call(again, x), seeded_call(program, x))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-5), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_it_goes_to_another_precision_and_back(dtype: torch.dtype, tolerance: float) -> None:
    model, x = Literal().eval(), images(batch=2)()[0]
    program, _, masked = programmed(model, x)
    (wanted,) = outputs(model, Inputs.of(x), masked)
    moved = copy.deepcopy(program).to(dtype)
    assert {p.dtype for p in moved.parameters()} == {dtype}
    result = moved(x.to(dtype))
    assert result.dtype == dtype
    assert max_rel_diff([wanted], [result]) < tolerance
    result.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == dtype for p in moved.parameters())
    assert max_rel_diff([wanted], [moved.to(torch.float32)(x)]) < tolerance
    assert torch.equal(program(x), program.to(torch.float32)(x))


def test_what_the_code_makes_goes_with_it() -> None:
    """Zeros, positions and numbers of the code's own."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.a(x)).view(-1, 8) + torch.zeros(1, 8, dtype=x.dtype, device=x.device) + x.new_ones(8)
        x = m.b(x) + torch.arange(4, dtype=x.dtype) + torch.full((4,), 0.5, dtype=x.dtype)
        return x * torch.tensor([1.0, 0.5, 2.0, 1.0]).to(x)

    model, x = Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 4)).eval(), vectors()()[0]
    program, _, masked = programmed(model, x)
    (wanted,) = outputs(model, Inputs.of(x), masked)
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.bfloat16, 0.1)):
        result = copy.deepcopy(program).to(dtype)(x.to(dtype))
        assert result.dtype == dtype
        assert max_rel_diff([wanted], [result]) < tolerance


def test_it_is_exported_again() -> None:
    model, x = Literal().eval(), images(batch=2)()[0]
    program, _, _ = programmed(model, x, units="groups")
    exported = torch.export.export(program, (x,))
    assert torch.equal(exported.module()(x), program(x))
    assert set(exported.state_dict) == set(program.state_dict())


def test_what_was_shrunk_can_be_shrunk_again() -> None:
    model, x = Literal().eval(), images(batch=2)()[0]
    program, _, _ = programmed(model, x, units="groups")
    graph = analyse(program, (x,), units="groups")
    kept = {name: program.get_parameter(f"{name}.weight").shape[0] for name in ("conv", "fc1")}
    assert graph.sizes == kept
    again, _, masked = programmed(program, x, units="groups")
    assert max_rel_diff(outputs(program, Inputs.of(x), masked), [again(x)]) < 1e-6


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_arguments_by_position_and_by_name() -> None:
    model, x, shift = Literal().eval(), images(batch=2)()[0], torch.randn(4)
    program, _, masked = programmed(model, x)
    (wanted,) = outputs(model, Inputs.of(x), masked)
    for result in (program(x), program(x=x), program(x, shift=None)):
        assert max_rel_diff([wanted], [result]) < 1e-6
    program, _, masked = programmed(model, {"shift": shift, "x": x})
    (wanted,) = outputs(model, Inputs.of({"x": x, "shift": shift}), masked)
    for result in (program(x=x, shift=shift), program(shift=shift, x=x), program(x, shift=shift)):
        assert max_rel_diff([wanted], [result]) < 1e-6


def test_what_is_no_tensor_is_what_it_was() -> None:
    model, x = Literal().eval(), images(batch=2)()[0]
    program, _, masked = programmed(model, (x, 3.0))
    (wanted,) = outputs(model, Inputs.of((x, 3.0)), masked)
    for result in (program(x, 3.0), program(x, scale=3.0), program(scale=3.0, x=x)):
        assert max_rel_diff([wanted], [result]) < 1e-6
    for call in (lambda: program(x, 2.0), lambda: program(x, None), lambda: program(x, x)):
        with pytest.raises(ModelError, match=r"was exported with 3\.0, which cannot become"):
            call()


class Options(nn.Module):
    """Words, truth values, nothing, and tensors in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: dict[str, Any], mode: str, twice: bool = False, mask: Tensor | None = None) -> dict[str, Any]:
        y = self.b(getattr(torch, mode)(self.a(x["pair"][0] + x["pair"][1])).view(-1, 8))
        y = 2 * y if twice else y
        return {"y": y if mask is None else y * mask, "n": [x["n"], None]}


def test_inputs_and_outputs_of_any_structure() -> None:
    model = Options().eval()
    x = {"pair": [torch.randn(3, 6), torch.randn(3, 6)], "n": 5}
    program, _, masked = programmed(model, (x, "tanh", True))
    (wanted,) = outputs(model, Inputs((x, "tanh", True), {}), masked)
    for result in (program(x, "tanh", True), program(x, mode="tanh", twice=True), program(x, "tanh", True, None)):
        assert list(result) == ["y", "n"]
        assert result["n"] == [5, None]
        assert max_rel_diff([wanted], [result["y"]]) < 1e-6
    other = {"pair": (x["pair"][0], x["pair"][1]), "n": 5}
    for call in (
        lambda: program(other, "tanh", True),  # a tuple, where a list was
        lambda: program(x, "relu", True),
        lambda: program(x | {"n": 6}, "tanh", True),
        lambda: program(x, "tanh", False),
        lambda: program(x, "tanh", True, torch.ones(4)),
        lambda: program({"pair": x["pair"]}, "tanh", True),
    ):
        plainly_refused(call)


def plainly_refused(call: Any) -> str:
    """With a ModelError in one sentence that prints no tensors."""
    with pytest.raises(ModelError) as caught:
        call()
    said = str(caught.value)
    assert said.endswith(".")
    assert "\n" not in said
    assert len(said) < 300
    return said


def test_wrong_calls_are_refused_plainly() -> None:
    model, x = Literal().eval(), images(batch=2)()[0]
    program, _, _ = programmed(model, x)
    for call in (
        program,
        lambda: program(x, 1.0, None, None),
        lambda: program(x, y=x),
        lambda: program(x, x=x),
        lambda: program(x, shift=torch.ones(4)),
        lambda: program([x]),
        lambda: program(None),
        lambda: program("x"),
    ):
        plainly_refused(call)


# ---- sizes of inputs -------------------------------------------------------------------------------------------------


class Pooling(nn.Module):
    """A model that takes batches and pictures of any size, though its code holds the number of maps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.a(x).relu().view(x.size(0), 8, -1)
        return self.b(maps.sum(-1) / x.size(-1))


@pytest.mark.parametrize("example", [1, 2, 5])
def test_batches_of_any_size_run_whatever_the_examples_was(example: int) -> None:
    model = Pooling().eval()
    program, _, masked = programmed(model, images(batch=example)())
    for batch in (1, 2, 3, 7):
        x = images(batch=batch)()[0]
        (wanted,) = outputs(model, Inputs.of(x), masked)
        assert wanted.shape == (batch, 4)
        assert max_rel_diff([wanted], [program(x)]) < 1e-6


def test_inputs_of_another_size_are_equal_or_refused_but_never_something_else() -> None:
    model = Pooling().eval()
    program, _, masked = programmed(model, images(batch=2)())
    for side in (6, 11):
        x = images(side=side, batch=2)()[0]
        (wanted,) = outputs(model, Inputs.of(x), masked)
        try:
            result = program(x)
        except ModelError:
            plainly_refused(partial(program, x))
        else:
            assert max_rel_diff([wanted], [result]) < 1e-6


def test_a_batch_that_the_code_fixes_is_said_to_be_fixed() -> None:
    net = Net(lambda m, x: m.b(m.a(x).relu().view(2, 8)) + x[:2, :4], a=nn.Linear(6, 8), b=nn.Linear(8, 4)).eval()
    program, _, masked = programmed(net, vectors(batch=2)())
    x = vectors(batch=2)()[0]
    assert max_rel_diff(outputs(net, Inputs.of(x), masked), [program(x)]) < 1e-6
    plainly_refused(lambda: program(vectors(batch=4)()[0]))


# ---- files -----------------------------------------------------------------------------------------------------------


@cache
def literal() -> Program:
    """A program that is only read."""
    return programmed(Literal().eval(), images(batch=2)())[0]


def saved(tmp_path: Path, model: nn.Module | None = None, example: Any = None) -> tuple[Program, Path, Any]:
    program = literal() if model is None else programmed(model, example)[0]
    path = tmp_path / "small.safetensors"
    prunus.save(program, path)
    with safe_open(path, "pt") as file:
        return program, path, json.loads(file.metadata()["prunus"])


def test_a_program_comes_back_from_its_file(tmp_path: Path) -> None:
    x = {"pair": [torch.randn(3, 6), torch.randn(3, 6)], "n": 5}
    program, path, plan = saved(tmp_path, Options().eval(), (x, "tanh", True))
    assert plan["form"] == "graph"
    assert plan["inputs"][1][1:] == [["value", "tanh"], ["value", True]]
    loaded = prunus.load(Options().eval(), path)
    assert isinstance(loaded, Program)
    assert torch.equal(loaded(x, "tanh", True)["y"], program(x, "tanh", True)["y"])
    assert list(loaded.state_dict()) == list(program.state_dict())
    again = tmp_path / "again.safetensors"
    prunus.save(loaded, again)
    assert torch.equal(prunus.load(Options().eval(), again)(x, "tanh", True)["y"], program(x, "tanh", True)["y"])


def test_group_norms_come_back_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 4, 1)).eval()
    program, path, _ = saved(tmp_path, model, images(batch=2)())
    x = images(batch=2)()[0]
    assert torch.equal(prunus.load(model, path)(x), program(x))


def test_a_program_whose_example_cannot_be_written_is_not_saved(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Own:
        number: int = 3

    class Takes(Options):
        def forward(self, x: Tensor, own: Any) -> Tensor:  # type: ignore[override]
            return self.b(self.a(x).relu().view(-1, 8)) * own.number

    torch.utils._pytree.register_constant(Own)
    program, _, _ = programmed(Takes().eval(), (torch.randn(3, 6), Own()))
    with pytest.raises(ModelError, match="cannot be saved: its example inputs hold objects"):
        prunus.save(program, tmp_path / "small.safetensors")
    assert not list(tmp_path.iterdir())


FORMS: list[Any] = [None, "", "Graph", "auto", 0, 1, True, [], {}, ["graph"], "eager\n"]


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_a_form_that_is_none_is_refused(form: Any, tmp_path: Path) -> None:
    program, path, plan = saved(tmp_path)
    with pytest.raises(ArtefactError) as caught:
        prunus.load(Literal().eval(), forge(path, program, plan | {"form": form}))
    assert "\n" not in str(caught.value).replace("eager\\n", "")


def test_a_plan_without_form_or_inputs_is_refused(tmp_path: Path) -> None:
    program, path, plan = saved(tmp_path)
    for key in ("form", "inputs"):
        lie = {k: v for k, v in plan.items() if k != key}
        with pytest.raises(ArtefactError):
            prunus.load(Literal().eval(), forge(path, program, lie))


INPUTS: list[Any] = [
    None, True, 1, "x", [], {}, ["args"], ["args", [], {}], ["args", [], {}, 1], ["args", {}, {}], ["args", None, None],
    ["args", [["tensor"]], {}], ["args", [["tensor", [2, 3, 8, 8]]], {}], ["args", [["tensor", 7, "float32"]], {}],
    ["args", [["tensor", [2, 3, 8, 8], "float31"]], {}], ["args", [["tensor", [2, 3, 8, 8], ["float32"]]], {}],
    ["args", [["tensor", [-2, 3, 8, 8], "float32"]], {}], ["args", [["tensor", [2.0, 3, 8, 8], "float32"]], {}],
    ["args", [["tensor", [True, 3, 8, 8], "float32"]], {}], ["args", [["tensor", [2**40, 3, 8, 8], "float32"]], {}],
    ["args", [["tensor", [2**14, 2**15], "complex128"]], {}], ["args", [["tensor", "2388", "float32"]], {}],
    ["args", [["tensor", [2**40, 0], "float32"]], {}], ["args", [["tensor", [10**30, 0], "float32"]], {}],
    ["args", [["tensor", [2, 3, 9, 9], "float32"]], {}], ["args", [["tensor", [], "float32"]], {}],
    ["args", [["tensor", [2, 3, 8, 8], "int64"]], {}], ["args", [["value", {}]], {}], ["args", [["value", [1]]], {}],
    ["args", [["value", None]], {}], ["args", [["list", 3]], {}], ["args", [["tuple", {"a": 1}]], {}],
    ["args", [["dict", [1]]], {}], ["args", [["set", []]], {}], ["args", [["module", "os"]], {}],
    ["args", [], {"x": ["value", 1]}], ["args", [], {"self": ["tensor", [2, 3, 8, 8], "float32"]}],
    ["args", [], {"no such": ["tensor", [2, 3, 8, 8], "float32"]}],
]  # fmt: skip


@pytest.mark.parametrize("lie", INPUTS, ids=lambda lie: json.dumps(lie)[:60])
def test_inputs_that_are_none_are_refused_as_a_bad_file(lie: Any, tmp_path: Path) -> None:
    program, path, plan = saved(tmp_path)
    with pytest.raises(ArtefactError) as caught:
        prunus.load(Literal().eval(), forge(path, program, plan | {"inputs": lie}))
    assert "\n" not in str(caught.value)


def test_inputs_nested_too_deep_are_refused(tmp_path: Path) -> None:
    program, path, plan = saved(tmp_path)
    for depth in (17, 120):
        deep = plan["inputs"][1][0]
        for _ in range(depth):
            deep = ["list", [deep]]
        with pytest.raises(ArtefactError):
            prunus.load(Literal().eval(), forge(path, program, plan | {"inputs": ["args", [deep], {}]}))


def test_what_a_file_may_make_us_allocate_is_limited_in_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not input by input: a thousand inputs of the largest size are a thousand times as large."""
    program, path, plan = saved(tmp_path)
    made: list[int] = []
    monkeypatch.setattr(
        "prunus.surgery.example.torch.randn",
        lambda shape, **_: made.append(torch.Size(shape).numel()) or torch.zeros(1).expand(shape),
    )
    large = ["tensor", [2**14, 2**14], "float32"]
    for inputs in (["args", [large] * 1000, {}], ["args", [["list", [large] * 1000]], {}]):
        with pytest.raises(ArtefactError):
            prunus.load(Literal().eval(), forge(path, program, plan | {"inputs": inputs}))
    assert sum(made) <= 2**28


@pytest.mark.slow
def test_inputs_changed_anywhere_are_refused_or_give_the_same_program(tmp_path: Path) -> None:
    x = {"pair": [torch.randn(3, 6), torch.randn(3, 6)], "n": 5}
    program, path, plan = saved(tmp_path, Options().eval(), (x, "tanh", True))
    wanted = program(x, "tanh", True)["y"]
    found = {"refused": 0, "same": 0}
    news: list[Any] = [None, True, 0, -1, 3, 2**40, 1.5, "", "x", "relu", "float64", "list", [], {}, ["value", 1]]
    for place in paths_into(plan["inputs"]):
        for new in news:
            if at(plan["inputs"], place) == new:
                continue
            lie = plan | {"inputs": put(plan["inputs"], place, new)}
            try:
                loaded = prunus.load(Options().eval(), forge(path, program, lie))
                same = torch.equal(loaded(x, "tanh", True)["y"], wanted)
            except (ArtefactError, ModelError):  # refused when it is loaded, or when it is called otherwise
                found["refused"] += 1
            else:
                assert same, (place, new)
                found["same"] += 1
    assert found["refused"] > 100
