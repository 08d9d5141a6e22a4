"""Published systems that plans are compared with, one file each, behind the interface of `planning.balancer`."""
