import pytest

from tests.serving.server_process import relibra_serve, write_text_model


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Return a whole model, the address of a server of it with two expert workers, and its process."""
    folder = tmp_path_factory.mktemp("served")
    model = write_text_model(folder)
    with relibra_serve(folder, "--experts", "2", "--timeout", "10", "--name", "tiny") as (url, process):
        yield model, url, process
