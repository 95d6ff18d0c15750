"""Small layers, written by hand, that several tests share."""

from __future__ import annotations

from evenload.plan.operators import Graph, Operator, Value
from evenload.units import MIB

HIDDEN = 4 * MIB
"""Sequence 2048 x hidden 1024 in bf16."""
WIDE = 11 * MIB
"""Sequence 2048 x intermediate 2816 in bf16."""
ROW = 2048 * 4
"""One fp32 number a token."""


class Builder:
    """Collects values and operators of one layer."""

    def __init__(self, size: int = HIDDEN):
        self.values = [Value(name="x", nbytes=size), Value(name="w", nbytes=1, held=True)]
        self.operators: list[Operator] = []

    def held(self, name: str, nbytes: int) -> str:
        self.values.append(Value(name=name, nbytes=nbytes, held=True))
        return name

    def call(self, path, name, inputs, nbytes, *, saves=(), own=False, out=None, **more) -> str:
        """An operator with one output; `own`: its backward needs its output."""
        out = out or f"{path}.{name}.{len(self.operators)}"
        self.values.append(Value(name=out, nbytes=nbytes))
        saves = (*saves, out) if own else tuple(saves)
        operator = Operator(path=path, name=name, inputs=tuple(inputs), outputs=(out,), saves=saves, **more)
        self.operators.append(operator)
        return out

    def linear(self, path, x, nbytes) -> str:
        return self.call(path, "linear", (x, "w"), nbytes, saves=(x, "w"), aten="mm", heavy=True, flops=1e9)

    def norm(self, path, x) -> str:
        """Llama's norm in bf16: computes in fp32, as Hugging Face writes it."""
        wide = self.call(path, "to", (x,), 2 * HIDDEN, aten="_to_copy", out=f"{path}.fp32")
        square = self.call(path, "pow", (wide,), 2 * HIDDEN, saves=(wide,))
        mean = self.call(path, "mean", (square,), ROW)
        shifted = self.call(path, "add", (mean,), ROW)
        root = self.call(path, "rsqrt", (shifted,), ROW, own=True)
        scaled = self.call(path, "mul", (wide, root), 2 * HIDDEN, saves=(wide, root))
        narrow = self.call(path, "to", (scaled,), HIDDEN, aten="_to_copy", out=f"{path}.bf16")
        return self.call(path, "mul", ("w", narrow), HIDDEN, saves=("w", narrow), out=f"{path}.out")

    def rope(self, x) -> str:
        turned = self.call("self_attn", "cat", (x,), HIDDEN)
        left = self.call("self_attn", "mul", (x, "cos"), HIDDEN, saves=("cos",))
        right = self.call("self_attn", "mul", (turned, "sin"), HIDDEN, saves=("sin",))
        return self.call("self_attn", "add", (left, right), HIDDEN)

    def mlp(self, path, x) -> str:
        gate = self.linear(f"{path}.gate_proj", x, WIDE)
        active = self.call(f"{path}.act_fn", "silu", (gate,), WIDE, saves=(gate,), out=f"{path}.act_fn.silu")
        up = self.linear(f"{path}.up_proj", x, WIDE)
        product = self.call(path, "mul", (active, up), WIDE, saves=(active, up), out=f"{path}.mul")
        return self.linear(f"{path}.down_proj", product, HIDDEN)

    def attention(self, x) -> str:
        self.held("cos", MIB // 4)
        self.held("sin", MIB // 4)
        q, k, v = (self.linear(f"self_attn.{part}_proj", x, HIDDEN) for part in "qkv")
        q, k = self.rope(q), self.rope(k)
        self.values += [Value(name="sdpa", nbytes=HIDDEN), Value(name="lse", nbytes=MIB // 8, differentiable=False)]
        self.operators.append(
            Operator(
                path="self_attn",
                name="scaled_dot_product_attention",
                aten="_scaled_dot_product_flash_attention_for_cpu",
                inputs=(q, k, v),
                outputs=("sdpa", "lse"),
                saves=(q, k, v, "sdpa", "lse"),
                heavy=True,
                flops=1e9,
            )
        )
        return self.linear("self_attn.o_proj", "sdpa", HIDDEN)

    def eager_attention(self, x) -> str:
        self.held("cos", MIB // 4)
        self.held("sin", MIB // 4)
        scores = 128 * MIB
        q, k, v = (self.linear(f"self_attn.{part}_proj", x, HIDDEN) for part in "qkv")
        q, k = self.rope(q), self.rope(k)
        product = self.call("self_attn", "matmul", (q, k), scores, saves=(q, k), aten="bmm", heavy=True)
        scaled = self.call("self_attn", "mul", (product,), scores)
        wide = self.call("self_attn", "softmax", (scaled,), 2 * scores, own=True, aten="_softmax", out="softmax")
        narrow = self.call("self_attn", "to", (wide,), scores, aten="_to_copy", out="probabilities")
        mixed = self.call("self_attn", "matmul", (narrow, v), HIDDEN, saves=(narrow, v), aten="bmm", heavy=True)
        return self.linear("self_attn.o_proj", mixed, HIDDEN)

    def graph(self, output: str) -> Graph:
        return Graph(values=tuple(self.values), operators=tuple(self.operators), input="x", output=output)


def llama(*, eager: bool = False) -> Graph:
    """A Llama decoder layer in bf16: sequence 2048, hidden 1024, intermediate 2816, 16 heads."""
    b = Builder()
    attention = b.eager_attention if eager else b.attention
    middle = b.call("", "add", ("x", attention(b.norm("input_layernorm", "x"))), HIDDEN, out="middle")
    return b.graph(
        b.call("", "add", (middle, b.mlp("mlp", b.norm("post_attention_layernorm", middle))), HIDDEN, out="y")
    )


def named(*names: str) -> Graph:
    """A chain of operators, given as `path:name` or `path:name:aten`, for tests of names alone."""
    b = Builder(8)
    value = "x"
    for text in names:
        path, name, aten = (*text.split(":"), "")[:3]
        value = b.call(path, name, (value,), 8, aten=aten)
    return b.graph(value)
