"""The device's part of a layer, by the functions of the executor, for one rank after another on one device.

Rows are gathered, multiplied by the experts at home, then by those in slots, and added up. Beside that all experts are
run as one product, from weights that lie in one tensor, and the copies are made that bring them there: what one
product could win, and what it costs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from relibra.calibration.grouped_experts import ERROR_BOUNDS
from relibra.errors import EngineError
from relibra.parallel.balanced import BalancedEP, parameters_replaced
from relibra.parallel.rows.dispatch import combine_tokens, dispatch_tokens
from relibra.parallel.rows.exchange import AllToAll
from relibra.parallel.rows.prepared_rows import PreparedRows
from relibra.parallel.rows.sorted_rows import SortedRows, slot_ends
from relibra.planning.costs.expert_shape import ExpertShape
from relibra.planning.traffic.rank_tables import RankTables

PARTS = ("gather", "product", "one product", "join", "combine", "layer")
SEED = 0

NO_GROUP = dist.ProcessGroup(FakeStore(), 0, 1)
"""Stands for the group of the ranks: nothing is exchanged in it."""


@dataclass(frozen=True, kw_only=True)
class PathModel:
    """A model whose experts are run.

    config        class of transformers' configuration, and what it calls the number of experts
    experts       module and class of its experts
    """

    name: str
    shape: ExpertShape
    num_experts: int
    config: tuple[str, str]
    experts: tuple[str, str]

    def experts_of(self, instances: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Return a module with this many experts, of random weights."""
        name, experts_key = self.config
        sizes = {"hidden_size": self.shape.hidden, "intermediate_size": self.shape.width, experts_key: instances}
        config = getattr(transformers, name)(**sizes, moe_intermediate_size=self.shape.width)
        config.num_experts = instances
        config._experts_implementation = "grouped_mm"
        module = importlib.import_module(f"transformers.models.{self.experts[0]}")
        experts: nn.Module = getattr(module, self.experts[1])(config).to(device, dtype)
        generator = torch.Generator(device).manual_seed(SEED)
        for parameter in experts.parameters():
            scale = 0.0 if parameter.ndim == 2 else self.shape.hidden**-0.5
            parameter.data.normal_(generator=generator).mul_(scale)
        return experts


MODELS = {
    "Qwen3-30B-A3B": (("Qwen3MoeConfig", "num_experts"), ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts"), 128),
    "gpt-oss-20b": (("GptOssConfig", "num_local_experts"), ("gpt_oss.modeling_gpt_oss", "GptOssExperts"), 32),
    "DeepSeek-V2-Lite": (
        ("DeepseekV2Config", "n_routed_experts"),
        ("deepseek_v2.modeling_deepseek_v2", "DeepseekV2Experts"),
        64,
    ),
}


def path_model(name: str, shape: ExpertShape) -> PathModel:
    """Return one of MODELS with experts of a shape."""
    config, experts, num_experts = MODELS[name]
    return PathModel(name=name, shape=shape, num_experts=num_experts, config=config, experts=experts)


class RankLayer(NamedTuple):
    """One layer of a micro-batch on one rank: what it does, and the seconds in which its rows were prepared."""

    tables: RankTables
    rows: PreparedRows
    layer: int
    prepare_seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arriving(AllToAll):
    """An exchange whose rows arrive from a buffer.

    buffer_XH   rows of any rank
    """

    buffer_XH: Tensor

    def move(self, rows: Tensor) -> Tensor:
        """Return as many rows as arrive; none is sent."""
        return self.buffer_XH[: sum(self.receive_R), : rows.shape[1]].to(rows.dtype)


class Path:
    """The device's part of the path: experts of one rank, and rows that stand for those of any rank."""

    def __init__(self, model: PathModel, num_homes: int, slots: int, rows: int, device: torch.device) -> None:
        """Allocate; emulated ranks share the memory, as values change no time.

        num_homes   experts at home on a rank
        rows        most rows that any rank gathers, computes or has
        """
        instances = num_homes + slots
        self.device, self.dtype = device, torch.bfloat16
        self.layer = BalancedEP.__new__(BalancedEP)  # a rank alone has no mesh; what `run_rows` needs is set here
        self.layer.experts = model.experts_of(instances, device, self.dtype)
        self.layer.experts_forward = self.layer.experts.forward
        self.layer.num_local_experts = instances
        self.num_homes = num_homes
        parameters = dict(self.layer.experts.named_parameters())
        self.homes = {name: p.data[:num_homes].requires_grad_() for name, p in parameters.items()}
        self.slots = {name: p.data[num_homes:].requires_grad_() for name, p in parameters.items()}
        self.joined = {name: torch.empty_like(p.data) for name, p in parameters.items()}
        generator = torch.Generator(device).manual_seed(SEED)
        shape = (rows, model.shape.hidden)
        self.rows_XH = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)
        self.gradient_XH = torch.randn(shape, generator=generator, device=device, dtype=self.dtype)

    def check(self) -> float:
        """Return the relative error of the experts' product against float64, expert by expert.

        raises   EngineError above the bound of the type
        """
        experts = self.layer.experts
        counts_P = torch.tensor([(33, 0, 1, 17)[slot % 4] for slot in range(len(next(experts.parameters())))])
        slot_Y = torch.repeat_interleave(torch.arange(len(counts_P)), counts_P).int()[: len(self.rows_XH)]
        ends_P = counts_P.cumsum(0).clamp(max=len(slot_Y)).int()
        rows = SortedRows(slot_Y.to(self.device), ends_P.to(self.device))
        rows_YH, ones_Y1 = self.rows_XH[: len(slot_Y)], self.rows_XH.new_ones(len(slot_Y), 1)
        with torch.no_grad():
            num_home_rows = int(ends_P[self.num_homes - 1])
            apart_YH = torch.cat(self.run_homes_and_slots(rows_YH, rows, ones_Y1, num_home_rows))
            joined_YH = self.run_one_product(rows_YH, rows, ones_Y1)
            config: Any = experts.config
            config._experts_implementation = "eager"
            kept = {name: parameter.data for name, parameter in experts.named_parameters()}
            try:
                experts.double()
                exact_YH = self.run_one_product(rows_YH.double(), rows, ones_Y1.double())
            finally:
                config._experts_implementation = "grouped_mm"
                for name, parameter in experts.named_parameters():
                    parameter.data = kept[name]
        error = max(
            float((found_YH.double() - exact_YH).norm() / exact_YH.norm()) for found_YH in (apart_YH, joined_YH)
        )
        if not error <= ERROR_BOUNDS[self.dtype]:
            raise EngineError(
                f"experts of the executor on {self.device} in {self.dtype} are off by {error:.1e} relative to float64, "
                f"allowed is {ERROR_BOUNDS[self.dtype]:.0e}: nothing is timed, try another build of torch"
            )
        return error

    def run_one_product(self, rows_YH: Tensor, rows: SortedRows, weight_Y1: Tensor) -> Tensor:
        """Return the weighted results of rows in slot order, of all experts as one product."""
        return self.layer.run_rows(rows_YH, rows, weight_Y1)

    def run_homes_and_slots(
        self, rows_YH: Tensor, rows: SortedRows, weight_Y1: Tensor, num_home_rows: int
    ) -> list[Tensor]:
        """Return the same in parts, experts at home before those in slots: as the executor does without static rows."""
        instances, own = len(rows.ends_P), slice(0, num_home_rows)
        with parameters_replaced(self.layer.experts, self.homes):
            at_home = rows.of(slice(0, self.num_homes), own)
            outputs = [self.layer.run_rows(rows_YH[own], at_home, weight_Y1[own])]
        own = slice(num_home_rows, len(rows_YH))
        if own.start == own.stop:
            return outputs
        with parameters_replaced(self.layer.experts, self.slots):
            in_slots = rows.of(slice(self.num_homes, instances), own)
            return [*outputs, self.layer.run_rows(rows_YH[own], in_slots, weight_Y1[own])]

    def works(self, one: RankLayer, top_k: int) -> dict[str, Callable[[], object]]:
        """Return the parts of one rank's layer; each runs forward and backward."""
        lists = one.rows.lists_on(self.device, None)[one.layer]
        tokens = len(lists.choice_X) // top_k
        exchange = _Arriving(
            send_R=one.tables.send_RP.sum(axis=1).tolist(),
            receive_R=one.tables.receive_RP.sum(axis=1).tolist(),
            group=NO_GROUP,
            place=one.tables.place,
            buffer_XH=self.rows_XH,
        )
        hidden_TH = self.rows_XH[:tokens].detach().requires_grad_()
        weights_TK = self.rows_XH[:tokens, :top_k].detach().float().requires_grad_()
        num, rows = len(lists.slot_Y), SortedRows(lists.slot_Y, slot_ends([one.tables], self.device)[0])
        rows_YH = self.rows_XH[:num].detach().requires_grad_()
        weight_Y1 = self.rows_XH[:num, :1].detach().float().requires_grad_()
        num_home_rows = one.tables.num_home_rows
        in_one, apart = [*self.layer.experts.parameters()], [*self.homes.values(), *self.slots.values()]

        def gather() -> None:
            gathered = dispatch_tokens(lists, exchange, hidden_TH, weights_TK)
            into = [self.gradient_XH[:num], self.gradient_XH[:num, :1].float()]
            torch.autograd.grad(gathered, [hidden_TH, weights_TK], into)

        def product() -> None:
            outputs = self.run_homes_and_slots(rows_YH, rows, weight_Y1, num_home_rows)
            into = self.gradient_XH[:num].split([len(output_XH) for output_XH in outputs])
            torch.autograd.grad(outputs, [rows_YH, weight_Y1, *apart], into, allow_unused=True)

        def one_product() -> None:
            output_YH = self.run_one_product(rows_YH, rows, weight_Y1)
            torch.autograd.grad(output_YH, [rows_YH, weight_Y1, *in_one], self.gradient_XH[:num], allow_unused=True)

        def join() -> None:
            for _ in range(2):  # before the forward and before the backward pass
                for name, homes in self.homes.items():
                    self.joined[name][: self.num_homes].copy_(homes.detach())

        def combine() -> None:
            output_TH = combine_tokens(lists, exchange, [rows_YH], tokens)
            torch.autograd.grad(output_TH, rows_YH, self.gradient_XH[:tokens])

        def layer() -> None:
            gathered_YH, gathered_Y1 = dispatch_tokens(lists, exchange, hidden_TH, weights_TK)
            outputs = self.run_homes_and_slots(gathered_YH, rows, gathered_Y1, num_home_rows)
            output_TH = combine_tokens(lists, exchange, outputs, tokens)
            inputs = [hidden_TH, weights_TK, *apart]
            torch.autograd.grad(output_TH, inputs, self.gradient_XH[:tokens], allow_unused=True)

        return dict(zip(PARTS, (gather, product, one_product, join, combine, layer), strict=True))

    def pushes(self, one: RankLayer) -> Callable[[], None]:
        """Return the copies of weights into the slots of a rank, twice: before the forward and the backward pass."""
        slots = [push.slot for _, push in one.tables.pushes_to_here]

        def copy() -> None:
            for _ in range(2):
                for slot in slots:
                    for weights in self.layer.experts.parameters():
                        weights.data[one.tables.num_homes + slot].copy_(weights.data[0], non_blocking=True)

        return copy
