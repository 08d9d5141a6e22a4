"""Deployments of a served model: which GPUs compute attention, which experts, and whether to separate them at all.

accelerator, served_model, service_level   inputs: GPUs with prices, sizes of a model, load and limit
performance, pipeline_time                 seconds of attention, experts, hops; of micro-batches that take turns at them
measured_seconds                           tables that take the place of formulas, and their file
deployment_plan, deployment_files          the decision, and its file
search                                     the best plan of a pair of accelerators
colocated, decision                        the same model without separation, and which of both is better
expert_redundancy                          copies of hot experts on expert nodes
expert_workers, expert_placement           experts that are picked together on one worker, and the placement of a server
worker_choice                              which copy computes a choice; rows per token and loads of workers
"""
