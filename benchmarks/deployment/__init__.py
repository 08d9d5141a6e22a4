"""Deployments of served models: acceptance of search and simulator, and figures of MegaScale-Infer beside ours."""
