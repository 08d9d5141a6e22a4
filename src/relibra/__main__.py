"""`python -m relibra`, for launchers such as torchrun that start modules."""

from relibra.cli.main import main

if __name__ == "__main__":
    main()
