"""Megatron-core: recorded routes for its routers, plans executed by its MoE layers (docs/guides/trainers.md).

In: models of Megatron-core and routes of samples; a plan and its demand. Out: the forward and backward passes that the
plan says. Start with `row_layout.py` (which rows a rank has) and `route_replay.py` (routes into `RouterReplay`); then
`execution.py` (a plan in a model), `moe_layer.py` (a layer of it) and `homes.py` (experts on other ranks).
"""
