
import pytest
@pytest.mark.parametrize("n","c2i t2i t2i_drafter lantern_c2i lantern_t2i lantern_fullprefix t2i_half t2i_int8 t2i_products anole lumina emu3".split())
def test_probe(n, request):
    from lantern_rt import open_bundle
    f = request.getfixturevalue(n + "_bundle")
    assert open_bundle(f).manifest.name == f.name
