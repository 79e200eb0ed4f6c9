"""Listening sockets and the private folder: what a taken port says, what a dead owner leaves."""

import os
import socket
import stat

import pytest

from kvern_engine.listen import ListenError, listen_tcp, listen_unix, url_of
from kvern_engine.probe import http_status
from kvern_engine.socket_dir import SocketDir


def test_port_zero_takes_a_free_one_and_a_taken_one_names_its_owner():
    with listen_tcp("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert url_of(sock) == f"http://127.0.0.1:{port}"
        with pytest.raises(ListenError) as error:
            listen_tcp("127.0.0.1", port)
    words = str(error.value)
    assert f"port {port} on 127.0.0.1 is already in use" in words
    assert f"pid {os.getpid()}" in words
    assert "--port 0" in words


def test_addresses_that_cannot_be():
    with pytest.raises(ListenError, match=r"--host 192\.0\.2\.1: this machine has no such address"):
        listen_tcp("192.0.2.1", 0)
    with pytest.raises(ListenError, match="--admin-host 'no such host'"):
        listen_tcp("no such host", 0, "--admin-port")


def test_unix_socket_of_a_dead_server_is_replaced_and_a_live_one_is_not(tmp_path):
    path = str(tmp_path / "s")
    listen_unix(path).close()
    with listen_unix(path) as sock:
        assert url_of(sock) == f"unix:{path}"
        with pytest.raises(ListenError, match="another server listens there"):
            listen_unix(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ListenError, match="a file that is no socket"):
        listen_unix(str(tmp_path / "file"))


def test_probe_of_a_silent_port_is_none():
    with listen_tcp("127.0.0.1", 0) as sock:
        assert http_status(sock, "/ready", timeout=0.05) is None


def test_socket_folder_is_private_short_and_removed(tmp_path):
    with SocketDir(str(tmp_path)) as folder:
        path = folder.path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path / "worker-9999.out"))
    assert not path.exists()
    with SocketDir("/tmp/" + "x" * 100) as folder:  # too long for a unix socket
        assert len(str(folder.path)) < 40


def test_a_folder_whose_owner_was_killed_is_removed_at_the_next_start(tmp_path):
    if os.fork() == 0:
        SocketDir(str(tmp_path)).__enter__()
        os._exit(0)  # no clean-up, as after kill -9
    os.wait()
    (left,) = tmp_path.glob("kvern-*")
    with SocketDir(str(tmp_path)) as live:
        assert not left.exists()
        with SocketDir(str(tmp_path)):
            assert live.path.exists()
