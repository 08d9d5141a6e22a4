"""What becomes of runs that are killed, stopped or out of disk space, and of damaged inputs."""
