import pytest
from tests.model.small import SMALL


@pytest.fixture(params=SMALL)
def config_of_every_family(request):
    return SMALL[request.param]
