"""The operator's environment: defaults, and the words for every mistake."""

import pytest

from kvern_operator.config import ConfigError, read_config


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    path.write_text("k" * 64 + "\n")
    return path


def environment(key, **more):
    return {"KVERN_NAMESPACE": "kvern-system", "KVERN_OPERATOR_KEY_FILE": str(key), **more}


def test_defaults(key):
    config = read_config(environment(key))
    assert config.namespace == config.settings.namespace == "kvern-system"
    assert config.watch_namespaces == () and config.lease_name == "kvern-operator"
    assert (config.resync, config.health_port, config.log_format, config.log_level) == (450, 8080, "text", "info")
    assert config.settings.operator_key == b"k" * 64  # without the newline
    assert config.settings.engine_image.startswith("ghcr.io/kvern/engine:")
    assert config.identity
    assert "kkk" not in repr(config)


def test_everything_is_taken_over(key):
    config = read_config(
        environment(
            key,
            KVERN_ENGINE_IMAGE="kvern/engine:e2e",
            KVERN_OPERATOR_IMAGE="kvern/operator:e2e",
            KVERN_IMAGE_PULL_POLICY="IfNotPresent",
            KVERN_IMAGE_PULL_SECRETS="one, two",
            KVERN_WATCH_NAMESPACES="a,b,a",
            KVERN_POD_NAME="kvern-operator-x",
            KVERN_LEASE_NAME="other",
            KVERN_CLUSTER_DOMAIN="corp.example",
            KVERN_LOG_FORMAT="json",
            KVERN_LOG_LEVEL="debug",
            KVERN_RESYNC_SECONDS="60",
            KVERN_HEALTH_PORT="9999",
            KVERN_POD_MONITORS="false",
            KVERN_OPERATOR_PORT_8080_TCP="a Service's variable is no mistake",
        )
    )
    settings = config.settings
    assert (settings.engine_image, settings.operator_image) == ("kvern/engine:e2e", "kvern/operator:e2e")
    assert (settings.image_pull_policy, settings.image_pull_secrets) == ("IfNotPresent", ("one", "two"))
    assert (config.watch_namespaces, config.identity, config.lease_name) == (("a", "b"), "kvern-operator-x", "other")
    assert settings.cluster_domain == "corp.example"
    assert (config.log_format, config.log_level, config.resync, config.health_port) == ("json", "debug", 60, 9999)
    assert config.pod_monitors is False


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVERN_NAMESPACE", "", "KVERN_NAMESPACE is not set; give the operator its own namespace"),
        ("KVERN_OPERATOR_KEY_FILE", "", "KVERN_OPERATOR_KEY_FILE is not set; name the file of the Secret"),
        ("KVERN_OPERATOR_KEY_FILE", "/no/such", 'KVERN_OPERATOR_KEY_FILE="/no/such" cannot be read: No such file'),
        ("KVERN_IMAGE_PULL_POLICY", "Sometimes", '="Sometimes" must be one of Always, IfNotPresent, Never'),
        ("KVERN_LOG_FORMAT", "xml", 'KVERN_LOG_FORMAT="xml" must be one of text, json'),
        ("KVERN_LOG_LEVEL", "loud", 'KVERN_LOG_LEVEL="loud" must be one of debug, info, warning, error'),
        ("KVERN_RESYNC_SECONDS", "1", 'KVERN_RESYNC_SECONDS="1" must be a whole number from 10 to 86400'),
        ("KVERN_RESYNC_SECONDS", "5m", 'KVERN_RESYNC_SECONDS="5m" must be a whole number'),
        ("KVERN_POD_MONITORS", "no", 'KVERN_POD_MONITORS="no" must be one of true, false'),
        ("KVERN_HEALTH_PORT", "0", 'KVERN_HEALTH_PORT="0" must be a whole number from 1 to 65535'),
    ],
)
def test_a_mistake_is_named(key, name, value, said):
    with pytest.raises(ConfigError) as caught:
        read_config(environment(key, **{name: value}))
    assert len(caught.value.problems) == 1 and said in str(caught.value)


def test_all_mistakes_come_at_once(tmp_path):
    short = tmp_path / "short"
    short.write_text("abc")
    with pytest.raises(ConfigError) as caught:
        read_config({"KVERN_OPERATOR_KEY_FILE": str(short), "KVERN_LOG_LEVEL": "x"})
    assert len(caught.value.problems) == 3
    assert "holds 3 bytes; a key has at least 32 random ones" in str(caught.value)
