"""The models: sizes as in the papers, forward passes against plain code, cuts, options, vmap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from kedge.errors import FieldError, GrammarError, KedgeError, ModelError, UnknownName
from kedge.models import build, models, norm_layer, schema
from kedge.models.networks import SliceDropout

CIFAR, MNIST, PAMAP2 = (3, 32, 32), (1, 28, 28), (27, 200)
RESNET = "stem stage1 stage2 stage3 stage4"
CCT = RESNET + " stage5 stage6 stage7"

# model, input, classes: parameters, features, stages before the head
SIZES = {
    ("linear", MNIST, 10): (7_850, 784, "flatten"),
    ("mlp", MNIST, 10): (50_890, 64, "stage1"),
    ("mlp(hidden=[200, 200])", MNIST, 10): (199_210, 200, "stage1 stage2"),
    ("lenet5", MNIST, 11): (44_555, 84, "stage1 stage2 stage3 stage4"),
    ("fedcog_cnn", CIFAR, 10): (62_006, 84, "stage1 stage2 stage3 stage4"),
    ("fedcog_cnn", MNIST, 10): (44_426, 84, "stage1 stage2 stage3 stage4"),
    ("fedcog_cnn100", CIFAR, 100): (69_380, 128, "stage1 stage2 stage3 stage4"),
    ("feddc_lenet", CIFAR, 10): (797_962, 192, "stage1 stage2 stage3 stage4"),
    ("mnist_cnn", MNIST, 10): (371_850, 128, "stage1 stage2 stage3 stage4"),
    ("pfl_cnn", CIFAR, 10): (1_626_442, 128, "stage1 stage2 stage3"),
    ("pamap2_cnn", PAMAP2, 10): (99_466, 64, "stage1 stage2 stage3"),
    ("vgg9", CIFAR, 10): (3_491_530, 512, "stage1 stage2 stage3 stage4 stage5"),
    ("vgg11", CIFAR, 10): (9_225_610, 512, "stage1 stage2 stage3 stage4 stage5"),
    ("resnet18", CIFAR, 10): (11_173_962, 512, RESNET),
    ("resnet18(norm=gn)", CIFAR, 10): (11_173_962, 512, RESNET),
    ("resnet18(width=16)", CIFAR, 10): (701_466, 128, RESNET),
    ("resnet18(stem=imagenet)", CIFAR, 10): (11_181_642, 512, RESNET),
    ("resnet34", CIFAR, 10): (21_282_122, 512, RESNET),
    ("resnet34(stem=imagenet)", CIFAR, 10): (21_289_802, 512, RESNET),
    ("resnet50", CIFAR, 100): (23_705_252, 2048, RESNET),
    ("resnet50(stem=imagenet)", CIFAR, 100): (23_712_932, 2048, RESNET),
    ("cct7", CIFAR, 100): (3_783_269, 256, CCT),
    ("cct7", CIFAR, 10): (3_760_139, 256, CCT),
}

# the smallest input that each model takes, or a small one where any will do
SMALL = {
    **{"linear": (5,), "mlp": (5,), "pamap2_cnn": (3, 28), "mnist_cnn": (1, 5, 6)},
    **{"lenet5": (1, 16, 17), "fedcog_cnn": (1, 16, 17), "feddc_lenet": (1, 17, 16)},
    **{"fedcog_cnn100": (1, 22, 23), "pfl_cnn": (1, 6, 7), "vgg9": (1, 8, 9), "vgg11": (1, 32, 33)},
    **{"resnet18": (1, 8, 9), "resnet34": (1, 8, 9), "resnet50": (1, 8, 9), "cct7": (1, 8, 9)},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# sizes and stages


@pytest.mark.parametrize("case", SIZES, ids=lambda case: f"{case[0]}-{case[1][0]}-{case[2]}")
def test_sizes_and_stages(case: tuple[str, tuple[int, ...], int]) -> None:
    text, shape, outputs = case
    parameters, features, stages = SIZES[case]
    with torch.device("meta"):
        model = build(text, shape, outputs)
        x = torch.empty(2, *shape)
    names = [name for name, _ in model.named_children()]
    assert count(model) == parameters
    assert names == [*stages.split(), "head"]
    assert isinstance(model.head, nn.Linear)
    assert model[:-1](x).shape == (2, features) == (2, model.head.in_features)
    assert model(x).shape == (2, outputs)


def test_every_model_has_a_size_and_a_small_case() -> None:
    assert set(models) == set(SMALL) == {text.partition("(")[0] for text, _, _ in SIZES}


@pytest.mark.parametrize("name", SMALL)
def test_small_inputs(name: str) -> None:
    model = build(name, SMALL[name], 3)
    assert type(model) is nn.Sequential
    assert model(torch.randn(2, *SMALL[name])).shape == (2, 3)


def test_resnet50_size_by_hand() -> None:
    def conv_bn(i: int, o: int, k: int) -> int:
        return i * o * k * k + 2 * o

    total, inputs = conv_bn(3, 64, 3), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        total += conv_bn(inputs, 4 * width, 1)
        for _ in range(blocks):
            total += conv_bn(inputs, width, 1) + conv_bn(width, width, 3)
            total += conv_bn(width, 4 * width, 1)
            inputs = 4 * width
    assert total + 2048 * 100 + 100 == 23_705_252


@pytest.mark.parametrize(
    ("text", "cut", "shape"),
    [
        ("resnet18", "stage2", (128, 16, 16)),  # FedImpro's default cut: 32 768 numbers
        ("resnet50", "stage2", (512, 16, 16)),
        ("resnet18(stem=imagenet)", "stem", (64, 8, 8)),
        ("vgg9", "stage3", (256, 4, 4)),  # the end of the convolutions
        ("vgg11", "stage4", (512, 2, 2)),
        ("fedcog_cnn", "stage2", (16, 5, 5)),
        ("cct7", "stem", (256, 256)),
        ("pfl_cnn", "stage2", (64, 14, 14)),
    ],
)
def test_cuts(text: str, cut: str, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model, x = build(text, CIFAR, 10), torch.empty(2, *CIFAR)
    for name, stage in model.named_children():
        x = stage(x)
        if name == cut:
            break
    assert x.shape == (2, *shape)


# forward passes: plain functions of the parameters in order, written from the papers

Take = Callable[[], Tensor]


def conv(x: Tensor, take: Take, bias: bool = True, **kwargs: int) -> Tensor:
    return F.conv2d(x, take(), take() if bias else None, **kwargs)


def bn(x: Tensor, take: Take) -> Tensor:
    return F.batch_norm(x, None, None, take(), take(), training=True)


def fc(x: Tensor, take: Take) -> Tensor:
    return F.linear(x, take(), take())


def gn(groups: int) -> Callable[[Tensor, Take], Tensor]:
    return lambda x, take: F.group_norm(x, groups, take(), take())


def plain_linear(x: Tensor, take: Take) -> Tensor:
    return fc(x.reshape(len(x), -1), take)


def plain_mlp(x: Tensor, take: Take) -> Tensor:
    x = fc(x.reshape(len(x), -1), take).relu()
    return fc(fc(x, take).relu(), take)


def plain_mlp_bn(x: Tensor, take: Take) -> Tensor:
    return fc(bn(fc(x.reshape(len(x), -1), take), take).relu(), take)


def plain_lenet5(x: Tensor, take: Take) -> Tensor:
    x = F.max_pool2d(bn(conv(x, take), take).relu(), 2)
    x = F.max_pool2d(bn(conv(x, take), take).relu(), 2)
    x = fc(x.reshape(len(x), -1), take).relu()
    return fc(fc(x, take).relu(), take)


def plain_lenet(x: Tensor, take: Take) -> Tensor:
    x = F.max_pool2d(conv(x, take).relu(), 2, 2)
    x = F.max_pool2d(conv(x, take).relu(), 2, 2)
    x = fc(x.reshape(len(x), -1), take).relu()
    return fc(fc(x, take).relu(), take)


def plain_cnn100(x: Tensor, take: Take) -> Tensor:
    for _ in range(3):
        x = F.max_pool2d(conv(x, take).relu(), 2, 2)
    return fc(fc(x.reshape(len(x), -1), take).relu(), take)


def plain_mnist_cnn(x: Tensor, take: Take) -> Tensor:
    for stride in (1, 2, 1, 1):
        x = gn(8)(conv(x, take, stride=stride, padding=1).relu(), take)
    return fc(x.mean((2, 3)), take)


def plain_pfl_cnn(x: Tensor, take: Take) -> Tensor:
    x = F.max_pool2d(conv(conv(x, take).relu(), take).relu(), 2)
    return fc(fc(x.reshape(len(x), -1), take).relu(), take)


def plain_pamap2_cnn(x: Tensor, take: Take) -> Tensor:
    for _ in range(2):  # as the authors write it: 1x9 convolutions over images of height one
        weight, bias = take().unsqueeze(2), take()
        x = F.conv2d(x.unsqueeze(2), weight, bias)
        x = F.max_pool2d(bn(x, take).relu(), (1, 2), stride=2).squeeze(2)
    return fc(fc(x.reshape(len(x), -1), take).relu(), take)


def plain_vgg9(x: Tensor, take: Take) -> Tensor:
    for _ in range(3):
        x = conv(conv(x, take, padding=1).relu(), take, padding=1).relu()
        x = F.max_pool2d(x, 2)
    x = fc(x.reshape(len(x), -1), take).relu()
    return fc(fc(x, take).relu(), take)


def plain_vgg11(x: Tensor, take: Take) -> Tensor:
    for layer in [64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]:
        x = F.max_pool2d(x, 2) if layer == "M" else conv(x, take, padding=1).relu()
    return fc(x.mean((2, 3)), take)


def plain_resnet(
    blocks: tuple[int, ...],
    bottleneck: bool = False,
    imagenet: bool = False,
    norm: Callable[[Tensor, Take], Tensor] = bn,
) -> Callable[[Tensor, Take], Tensor]:
    def block(x: Tensor, take: Take, stride: int, project: bool) -> Tensor:
        if bottleneck:
            y = norm(conv(x, take, bias=False), take).relu()
            y = norm(conv(y, take, bias=False, stride=stride, padding=1), take).relu()
            y = norm(conv(y, take, bias=False), take)
        else:
            y = norm(conv(x, take, bias=False, stride=stride, padding=1), take).relu()
            y = norm(conv(y, take, bias=False, padding=1), take)
        if project:
            x = norm(conv(x, take, bias=False, stride=stride), take)
        return (x + y).relu()

    def forward(x: Tensor, take: Take) -> Tensor:
        stem = {"stride": 2, "padding": 3} if imagenet else {"padding": 1}
        x = norm(conv(x, take, bias=False, **stem), take).relu()
        if imagenet:
            x = F.max_pool2d(x, 3, 2, 1)
        for stage, number in enumerate(blocks):
            for i in range(number):
                first = i == 0 and (stage > 0 or bottleneck)
                x = block(x, take, 2 if i == 0 and stage else 1, first)
        return fc(x.mean((2, 3)), take)

    return forward


def plain_cct7(x: Tensor, take: Take) -> Tensor:
    position = take()  # a module's own parameters come before those of its children
    x = F.max_pool2d(conv(x, take, bias=False, padding=1).relu(), 3, 2, 1)
    x = x.reshape(len(x), 256, -1).mT + position
    for _ in range(7):
        y = F.layer_norm(x, (256,), take(), take())
        attention = nn.MultiheadAttention(256, 4, batch_first=True, dtype=x.dtype)
        attention.in_proj_weight, attention.in_proj_bias = nn.Parameter(take()), None
        attention.out_proj.weight, attention.out_proj.bias = (
            nn.Parameter(take()),
            nn.Parameter(take()),
        )
        x = x + attention(y, y, y)[0]
        x = F.layer_norm(x, (256,), take(), take())
        x = x + fc(F.gelu(fc(x, take)), take)
    x = F.layer_norm(x, (256,), take(), take())
    weights = torch.softmax(fc(x, take), 1)
    return fc(torch.einsum("bto,btd->bd", weights, x), take)


PLAIN = {
    "linear": (plain_linear, (2, 5)),
    "mlp(hidden=[7, 6])": (plain_mlp, (2, 5)),
    "mlp(hidden=9, norm=bn)": (plain_mlp_bn, (5,)),
    "lenet5": (plain_lenet5, MNIST),
    "lenet5(norm=none)": (plain_lenet, MNIST),
    "fedcog_cnn": (plain_lenet, CIFAR),
    "feddc_lenet": (plain_lenet, CIFAR),
    "fedcog_cnn100": (plain_cnn100, CIFAR),
    "mnist_cnn": (plain_mnist_cnn, MNIST),
    "pfl_cnn(dropout=false)": (plain_pfl_cnn, CIFAR),
    "pamap2_cnn": (plain_pamap2_cnn, PAMAP2),
    "vgg9(dropout=false)": (plain_vgg9, CIFAR),
    "vgg11": (plain_vgg11, CIFAR),
    "resnet18": (plain_resnet((2, 2, 2, 2)), (3, 16, 16)),
    "resnet18(norm=gn)": (plain_resnet((2, 2, 2, 2), norm=gn(32)), (3, 16, 16)),
    "resnet18(norm=gn, groups=2)": (plain_resnet((2, 2, 2, 2), norm=gn(2)), (3, 16, 16)),
    "resnet18(stem=imagenet)": (plain_resnet((2, 2, 2, 2), imagenet=True), CIFAR),
    "resnet34": (plain_resnet((3, 4, 6, 3)), (3, 8, 8)),
    "resnet50": (plain_resnet((3, 4, 6, 3), bottleneck=True), (3, 8, 8)),
    "cct7": (plain_cct7, (3, 16, 12)),
}


@pytest.mark.parametrize("text", PLAIN)
def test_forward_is_that_of_plain_code(text: str) -> None:
    plain, shape = PLAIN[text]
    model = build(text, shape, 10).double()
    for p in model.parameters():  # no zeros and ones left, so that every one of them counts
        p.data += 0.02 * torch.randn_like(p)
    x = torch.randn(3, *shape, dtype=torch.float64)
    parameters = iter([p.detach() for p in model.parameters()])
    expected = plain(x, lambda: next(parameters))
    assert next(parameters, None) is None
    torch.testing.assert_close(model(x).detach(), expected)
    assert expected.std(0).mean() > 1e-4  # the input reaches the output


# vmap


def stacked(text: str, shape: tuple[int, ...], clients: int) -> tuple[list[nn.Module], dict, dict]:
    nets: list[nn.Module] = [build(text, shape, 3).double() for _ in range(clients)]
    params, buffers = stack_module_state(nets)
    return nets, params, buffers


@pytest.mark.parametrize("name", [n for n in SMALL if n not in ("vgg9", "pfl_cnn", "resnet34")])
def test_vmap_over_clients_is_the_loop(name: str) -> None:
    nets, params, buffers = stacked(name, SMALL[name], 2)
    x = torch.randn(2, 2, *SMALL[name], dtype=torch.float64)

    def forward(params: dict, buffers: dict, x: Tensor) -> tuple[Tensor, dict]:
        buffers = {k: v.clone() for k, v in buffers.items()}
        return functional_call(nets[0], (params, buffers), (x,)), buffers

    outputs, after = vmap(forward)(params, buffers, x)
    for i, net in enumerate(nets):
        torch.testing.assert_close(outputs[i], net(x[i]))
        for key, value in net.named_buffers():
            torch.testing.assert_close(after[key][i], value)


@pytest.mark.parametrize("text", ["lenet5", "pamap2_cnn", "resnet18(norm=gn)", "resnet18", "cct7"])
def test_vmap_of_gradients(text: str) -> None:
    shape = SMALL[text.partition("(")[0]]
    nets, params, buffers = stacked(text, shape, 2)
    x, y = torch.randn(2, 3, *shape, dtype=torch.float64), torch.randint(3, (2, 3))

    def loss(params: dict, buffers: dict, x: Tensor, y: Tensor) -> tuple[Tensor, dict]:
        buffers = {k: v.clone() for k, v in buffers.items()}
        return F.cross_entropy(functional_call(nets[0], (params, buffers), (x,)), y), buffers

    grads, _ = vmap(grad(loss, has_aux=True))(params, buffers, x, y)
    for i, net in enumerate(nets):
        F.cross_entropy(net(x[i]), y[i]).backward()
        for key, p in net.named_parameters():
            torch.testing.assert_close(grads[key][i], p.grad)


@pytest.mark.parametrize("text", ["vgg9", "pfl_cnn", "cct7(dropout=0.2, stochastic_depth=0.5)"])
def test_dropout_under_vmap(text: str) -> None:
    shape = SMALL[text.partition("(")[0]]
    model = build(text, shape, 3)
    params = {k: torch.stack([p, p]) for k, p in model.named_parameters()}
    x = torch.randn(2, *shape)
    run = vmap(lambda p: functional_call(model, p, (x,)), randomness="different")
    outputs = run(params)
    assert not torch.equal(outputs[0], outputs[1])
    model.eval()
    torch.testing.assert_close(run(params), model(x).expand(2, 2, 3))


# dropout


def test_slice_dropout_drops_whole_slices() -> None:
    x = torch.ones(40, 50, 3, 2)
    maps = SliceDropout(0.25, dims=2)
    kept = maps(x)
    assert torch.equal(kept, kept[:, :, :1, :1].expand_as(x))
    assert set(kept.mul(3).round().unique().tolist()) == {0.0, 4.0}
    assert (kept[..., 0, 0] == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    kept = SliceDropout(0.5, dims=1)(x)
    assert torch.equal(kept, kept[:, :1, :1, :1].expand_as(x))
    assert torch.equal(maps.eval()(x), x)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("vgg9", [0.05, 0.1, 0.1]),
        ("vgg9(dropout=false)", []),
        ("pfl_cnn", [0.25, 0.5]),
        ("pfl_cnn(dropout=false)", []),
        ("cct7", []),
        ("cct7(attention_dropout=0.1)", [0.1] * 7),
        ("cct7(dropout=0.1)", [0.1] * (1 + 3 * 7)),
        ("cct7(stochastic_depth=0.6)", [r for i in range(1, 7) for r in (i / 10, i / 10)]),
    ],
)
def test_dropout_rates(text: str, rates: list[float]) -> None:
    with torch.device("meta"):
        model = build(text, CIFAR, 10)
    found = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert found == pytest.approx(rates)


# norms and initial weights


@pytest.mark.parametrize("norm", ["bn", "gn", "none"])
@pytest.mark.parametrize("name", [name for name in SMALL if "norm" in schema(name).options])
def test_norms(name: str, norm: str) -> None:
    if name.startswith("resnet") and norm == "none":
        with pytest.raises(FieldError, match=f"{name}.norm = 'none' is not one of: bn, gn"):
            build(f"{name}(norm=none)", CIFAR, 10)
        return
    with torch.device("meta"):
        model = build(f"{name}(norm={norm})", SMALL[name], 10)
        assert model(torch.empty(2, *SMALL[name])).shape == (2, 10)
    kinds = {"bn": (nn.BatchNorm1d, nn.BatchNorm2d), "gn": nn.GroupNorm, "none": ()}
    norms = {k for k in kinds if any(isinstance(m, kinds[k]) for m in model.modules())}
    assert norms == ({norm} - {"none"})
    assert bool(list(model.buffers())) == (norm == "bn")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("lenet5(norm=gn)", [3, 8]),
        ("mnist_cnn", [8, 8, 8, 8]),
        ("resnet18(norm=gn)", [32] * 20),
        ("resnet18(norm=gn, groups=2)", [2] * 20),
        ("mlp(hidden=[64, 7], norm=gn)", [1, 1]),
    ],
)
def test_groups(text: str, groups: list[int]) -> None:
    with torch.device("meta"):
        model = build(text, CIFAR, 10)
    assert [m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)] == groups


@pytest.mark.parametrize(("channels", "groups"), [(1, 1), (7, 1), (48, 24), (96, 32), (2048, 32)])
def test_norm_layer_groups_divide_the_channels(channels: int, groups: int) -> None:
    layer = norm_layer("gn", channels)
    assert isinstance(layer, nn.GroupNorm)
    assert layer.num_groups == groups


def test_same_seed_same_weights() -> None:
    torch.manual_seed(3)
    first = build("vgg9", CIFAR, 10)
    torch.manual_seed(3)
    second = build("vgg9", CIFAR, 10)
    pair = (first.parameters(), second.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def test_pfl_cnn_has_glorot_weights() -> None:
    weight = build("pfl_cnn", CIFAR, 10).stage3.fc.weight
    bound = math.sqrt(6 / (64 * 14 * 14 + 128))
    assert weight.abs().max().item() == pytest.approx(bound, rel=1e-3)
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.01)


def test_torchvision_nets_have_its_initial_weights() -> None:
    vgg, net = build("vgg11", CIFAR, 10), build("resnet18(stem=imagenet)", CIFAR, 10)
    assert vgg.stage5.conv1.weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)
    assert not vgg.stage5.conv1.bias.any()
    weight = net.stage2.block1.conv1.weight  # 64 to 128 channels: fan out, not in
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (128 * 9)), rel=0.02)


def test_cct7_has_its_authors_initial_weights() -> None:
    model = build("cct7", CIFAR, 10)
    assert model.stage3.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.stem.position.std().item() == pytest.approx(0.2, rel=0.02)
    assert model.stem.conv.weight.std().item() == pytest.approx(math.sqrt(2 / 27), rel=0.05)
    assert not model.head.bias.any()


# errors


@pytest.mark.parametrize(
    ("text", "shape", "error", "message"),
    [
        ("lenet", MNIST, UnknownName, "no model 'lenet'. Did you mean 'lenet5'"),
        ("lenet5(nrom=gn)", MNIST, UnknownName, "no option of lenet5 'nrom'. Did you mean 'norm'?"),
        ("linear(norm=gn)", MNIST, UnknownName, "no option of linear 'norm'. There are: none."),
        ("lenet5(norm=layer)", MNIST, FieldError, "lenet5.norm = 'layer' is not one of: bn, gn, n"),
        ("lenet5(norm=1)", MNIST, FieldError, "lenet5.norm = 1 is not one of"),
        ("resnet18(stem=mnist)", CIFAR, FieldError, "resnet18.stem = 'mnist' is not one of: cifar"),
        ("resnet18(groups=0)", CIFAR, FieldError, "resnet18.groups = 0 is below 1"),
        ("mlp(hidden=[])", (3,), FieldError, "mlp.hidden is empty; give at least 1"),
        (
            "mlp(hidden=[8, 0.5])",
            (3,),
            FieldError,
            "mlp.hidden = (8, 0.5) is not a list of whole n",
        ),
        (
            "mlp(hidden=none)",
            (3,),
            FieldError,
            "mlp.hidden = 'none' is not a whole number at least 1 or a list of whole n",
        ),
        ("mlp(hidden=0.5)", (3,), FieldError, "mlp.hidden = 0.5 is not a whole number"),
        ("mlp(hidden=true)", (3,), FieldError, "mlp.hidden = True is not a whole number"),
        ("pfl_cnn(dropout=0.5)", CIFAR, FieldError, "pfl_cnn.dropout = 0.5 is not true or false"),
        ("cct7(dropout=1)", CIFAR, FieldError, "cct7.dropout = 1 is not below 1"),
        ("lenet5(gn)", MNIST, GrammarError, "written by name, as in lenet5(norm=...)"),
        ("lenet5:gn", MNIST, GrammarError, "lenet5 has no presets; write lenet5(norm=...)"),
        ("lenet5+mlp", MNIST, GrammarError, "expected one name, found 2"),
        ("lenet5", (784,), ModelError, "lenet5 takes images (channels, height, width) of at lea"),
        ("lenet5", (1, 15, 28), ModelError, "of at least 16x16, not inputs of shape (1, 15, 28)"),
        ("fedcog_cnn100", (3, 21, 32), ModelError, "of at least 22x22"),
        ("pfl_cnn", (3, 5, 5), ModelError, "of at least 6x6"),
        ("vgg9", (3, 7, 32), ModelError, "of at least 8x8"),
        ("vgg11", MNIST, ModelError, "vgg11 takes images (channels, height, width) of at least 32"),
        ("resnet18", (3, 32), ModelError, "not inputs of shape (3, 32). Choose another model"),
        ("pamap2_cnn", (27, 27), ModelError, "takes series (channels, length) of length 28 or mo"),
        ("pamap2_cnn", CIFAR, ModelError, "not inputs of shape (3, 32, 32)"),
        ("cct7", (0, 32, 32), ModelError, "not inputs of shape (0, 32, 32)"),
        ("mlp", (), ModelError, "mlp takes inputs of any shape with sizes above 0, not inputs of"),
        ("linear", (3, 0), ModelError, "linear takes inputs of any shape with sizes above 0"),
        ("linear", (2.0,), ModelError, "not inputs of shape (2.0,)"),
    ],
)
def test_errors(text: str, shape: tuple[int, ...], error: type[KedgeError], message: str) -> None:
    with pytest.raises(error) as caught:
        build(text, shape, 10)
    assert message in str(caught.value)


@pytest.mark.parametrize("outputs", [0, -1, 2.0, True])
def test_outputs(outputs: int) -> None:
    with pytest.raises(ModelError, match="a model has one output or more"):
        build("mlp", (3,), outputs)


def test_a_model_of_your_own() -> None:
    @models.register("tiny")
    def tiny(shape: tuple[int, ...], outputs: int, *, width: int = 4) -> nn.Sequential:
        return build(f"mlp(hidden={width})", shape, outputs)

    try:
        assert list(schema("tiny").options) == ["width"]
        assert build("tiny(width=2)", (3,), 2).head.in_features == 2
    finally:
        models.remove("tiny")
