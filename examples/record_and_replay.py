"""Record the experts a model takes in one process and replay them in another model: R3 in thirty lines."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from relibra.replay import BatchRoutes, record_routing, replay_routing

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=16,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
engine = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()  # samples, in bf16
trainer = Qwen3MoeForCausalLM(config).eval()  # trains, in fp32, from the same weights
trainer.load_state_dict({name: weight.float() for name, weight in engine.state_dict().items()})

tokens = torch.randint(1, 64, (4, 200))
mask = torch.ones_like(tokens)
with torch.no_grad(), record_routing(engine) as recorder:
    engine(input_ids=tokens, attention_mask=mask)
trace = recorder.take_trace(tokens, mask, source="bf16 engine")

with replay_routing(trainer, BatchRoutes.padded(trace, mask, tokens)) as replay:
    trainer(input_ids=tokens, attention_mask=mask).logits.logsumexp(-1).mean().backward()

print(f"replayed {trace.num_rows * trace.num_layers} choices of 2 experts: 4 samples x 200 tokens x 3 layers")
print(f"native routing of the trainer differs in some tokens: {0 < replay.disagreement < 0.1}")
print(f"its router gets gradients: {bool(trainer.model.layers[0].mlp.gate.weight.grad.any())}")

# Output:
# replayed 2400 choices of 2 experts: 4 samples x 200 tokens x 3 layers
# native routing of the trainer differs in some tokens: True
# its router gets gradients: True
