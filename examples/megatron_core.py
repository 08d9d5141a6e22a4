"""Execute plans in a tiny GPT of Megatron-core on two CPU processes: the losses and weights of the stock model."""

import sys
import tempfile
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from demos.megatron_on_cpu import run_on_cpu

from relibra import Budget, ScheduledDemand, StepPlan, cluster_preset, plan_step
from relibra.integrations.megatron.row_layout import RowLayout
from relibra.routing.synthetic import TraceShape, domain_trace

RANKS, STEPS, MICRO_BATCHES, SAMPLES, LENGTH = 2, 3, 4, 2, 48
LAYERS, EXPERTS, TOP_K, VOCAB = 2, 8, 2, 64


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_on_rank, (folder,), nprocs=RANKS)


def train_on_rank(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run_on_cpu()  # on GPUs: leave it out
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=RANKS)
    losses, trained = train_stock()
    planned_losses, planned = train_planned()
    differences = [(trained[name] - planned[name]).abs().max() for name in trained]
    if rank == 0:
        print(f"losses differ by less than 1e-6: {bool(np.abs(np.subtract(losses, planned_losses)).max() < 1e-6)}")
        print(f"weights after Adam differ by less than 1e-4: {bool(max(differences) < 1e-4)}")
    dist.barrier()
    dist.destroy_process_group()


def build_model(planned: bool) -> torch.nn.Module:
    """Return a GPT of Megatron-core; planned: its MoE layers can follow plans, which is the only change."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from relibra.integrations.megatron.moe_layer import with_planned_layers

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=32,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_load_balancing_type="none",
        moe_enable_routing_replay=True,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=RANKS,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # this and what follows: for a CPU
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    torch.manual_seed(0)
    return GPTModel(config, with_planned_layers(spec) if planned else spec, VOCAB, SAMPLES * LENGTH)


def step_routes(step: int) -> list[np.ndarray]:
    """Return the experts of each row of this rank, by micro-batch: of the samples that it trains in this step."""
    samples = RANKS * MICRO_BATCHES * SAMPLES
    shape = TraceShape(rows_per_sample=[LENGTH] * samples, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    trace = domain_trace(shape, np.random.default_rng(step), num_domains=3, sigma=1.5)  # of a rollout
    rows = RowLayout().rows([LENGTH] * SAMPLES)
    own = range(dist.get_rank() * SAMPLES * MICRO_BATCHES, (dist.get_rank() + 1) * SAMPLES * MICRO_BATCHES)
    routes = [trace.experts_TLK[trace.sample_rows(s)] for s in own]
    return [rows.routes(0, routes[m * SAMPLES : (m + 1) * SAMPLES], num_experts=EXPERTS) for m in range(MICRO_BATCHES)]


def loss_of(model: torch.nn.Module, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
    ids = torch.randint(VOCAB, (1, SAMPLES * LENGTH), generator=generator)
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1]).tril() < 0.5
    return model(ids, torch.arange(ids.shape[1])[None], mask, labels=ids.roll(-1, dims=1)).mean() / MICRO_BATCHES


def reduce_gradients(model: torch.nn.Module) -> None:
    """Average over ranks what both have, as Megatron's DistributedDataParallel does; experts are on one rank each."""
    for parameter in model.parameters():
        if getattr(parameter, "allreduce", True):
            dist.all_reduce(parameter.grad)
        parameter.grad /= RANKS


def train_stock() -> tuple[list[float], dict[str, torch.Tensor]]:
    from relibra.integrations.megatron.route_replay import RouteReplay

    model = build_model(planned=False)
    adam, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        adam.zero_grad()
        with RouteReplay([model]) as replay:
            for number, ids_TLK in enumerate(step_routes(step)):
                replay.begin(ids_TLK)
                loss = loss_of(model, step, number)
                loss.backward()
                losses.append(float(loss.detach()))
        reduce_gradients(model)
        adam.step()
    return losses, {n: t.clone() for n, t in model.state_dict().items() if torch.is_tensor(t)}


def train_planned() -> tuple[list[float], dict[str, torch.Tensor]]:
    from megatron.core import parallel_state

    from relibra.integrations.megatron.execution import execute_plan, gather_demand
    from relibra.integrations.megatron.homes import logical_order, relocate

    model, previous = build_model(planned=True), None
    adam, losses = torch.optim.Adam(model.parameters(), lr=1e-3), []
    group = parallel_state.get_expert_model_parallel_group()
    for step in range(STEPS):
        routes = step_routes(step)
        demand = gather_demand(routes, group, num_experts=EXPERTS, layer_ids=np.arange(LAYERS))
        plan = make_plan(demand, previous)
        moved = relocate([model], plan.physical_to_logical_map, adam)
        adam.zero_grad()
        with execute_plan([model], plan, demand) as execution:
            for number, ids_TLK in enumerate(routes):
                execution.begin(number, ids_TLK)
                loss = loss_of(model, step, number)
                loss.backward()
                losses.append(float(loss.detach()))
        reduce_gradients(model)
        adam.step()
        if dist.get_rank() == 0:
            static = StepPlan.static(plan.scheduled(demand), plan.topology, dispatch=plan.dispatch)
            print(
                f"step {step}: skew {static.skew(demand):.3f} -> {plan.skew(demand):.3f}, {moved} experts moved, "
                f"{plan.num_copies} replicas"
            )
        previous = plan
    with logical_order([model], adam):  # checkpoints and exports: inside
        return losses, {n: t.clone() for n, t in model.state_dict().items() if torch.is_tensor(t)}


def make_plan(demand: ScheduledDemand, previous: StepPlan | None) -> StepPlan:
    """Return the plan, the same on all ranks as demand and budget are: first with other homes, then with replicas."""
    budget = Budget(slots=0 if previous is None else 1, pack_samples=False)
    return plan_step(demand, cluster_preset("laptop", RANKS, 1), budget, "relibra_paper_anywhere", previous=previous)


if __name__ == "__main__":
    sys.exit(main())

# Output:
# step 0: skew 1.135 -> 1.051, 6 experts moved, 0 replicas
# step 1: skew 1.206 -> 1.004, 0 experts moved, 6 replicas
# step 2: skew 1.235 -> 1.005, 0 experts moved, 8 replicas
# losses differ by less than 1e-6: True
# weights after Adam differ by less than 1e-4: True
