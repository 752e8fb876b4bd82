"""Checkpoints in Google Cloud Storage: a server on this machine stands in for it."""

import signal
import socket
import threading

import jax
import numpy as np
import pytest

from examples import generate
from examples.train import main
from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef
from tests.support.trainer import STEPS, losses, on_devices, stop_at, train


@pytest.fixture(scope="module")
def bucket():
    """A bucket of a server on this machine."""
    pytest.importorskip("gcsfs", reason="needs requirements/gcs.txt")
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs its package")
    objects = emulator.objects
    download = objects.download

    def with_generation(request, response, storage, *args, **named):
        """Says which version of an object was read, as Google does and TensorStore needs it."""
        download(request, response, storage, *args, **named)
        if response.status < 400:
            name = request.params["bucket_name"], request.params["object_id"]
            response["x-goog-generation"] = storage.get_file_obj(*name)["generation"]

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = emulator.create_server("localhost", port, in_memory=True, default_bucket="bucket")
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "download", with_generation)
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")  # of gcsfs
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://localhost:{port}")
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks Google by gRPC
        patch.setenv("FSSPEC_GS_TOKEN", "anon")
        yield "gs://bucket/runs"
    threading.Thread(target=server.stop, daemon=True).start()


def test_a_run_saves_to_a_bucket_stops_and_goes_on(bucket, text, tmp_path, trained_run, capsys):
    flags = ["--name", "x", "--checkpoint-dir", bucket]
    with on_devices(1):
        with stop_at(11, lambda: signal.raise_signal(signal.SIGINT)):
            assert train(text, tmp_path, *flags) == 130
        run = tmp_path / "x"
        assert not (run / "checkpoints").exists()
        assert main(["--resume", str(run)]) == 2  # only a flag names a bucket
        assert f"--checkpoint-dir {bucket}" in capsys.readouterr().out
        assert main(["--resume", str(run), *flags[2:]]) == 0
        assert losses(run) == losses(trained_run)
        found, expected = (
            trained.load(CheckpointRef(x, checkpoint_dir=y))
            for x, y in ((run, bucket), (trained_run, ""))
        )
        assert found.step == STEPS
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
        assert generate.main([str(run), "--tokens", "5", *flags[2:]]) == 0
        more = ["--name", "y", "--steps", "26", *flags[2:]]
        assert main(["--from-run", f"{run}:{STEPS}", *more]) == 0
        capsys.readouterr()
        assert train(text, tmp_path / "elsewhere", *flags) == 2
        assert "gs://bucket/runs/x has checkpoints of another run" in capsys.readouterr().err
