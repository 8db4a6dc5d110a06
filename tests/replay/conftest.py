from pathlib import Path

import pytest
from stub_endpoint import StubEndpoint, train_tokenizer

FIXTURES = Path(__file__).parent / "fixtures" / "traces"


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def traces():
    return FIXTURES


@pytest.fixture
def endpoint(tokenizer):
    with StubEndpoint(tokenizer) as stub:
        yield stub
