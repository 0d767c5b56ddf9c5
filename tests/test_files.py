"""Files that are whole or not there."""

from pathlib import Path

import pytest

from sfiformer.files import whole_file


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder where even root cannot write")
def test_an_error_names_the_file_that_was_asked_for():
    with pytest.raises(FileNotFoundError) as caught, whole_file(Path("/proc/table.csv")):
        pass
    assert caught.value.filename == "/proc/table.csv"
