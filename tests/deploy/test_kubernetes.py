"""The manifests: valid for old and new clusters, and each part finds the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = DEPLOY / "kubernetes"
ENGINES = ("vllm-prefill", "vllm-decode")

Object = dict[str, Any]


def kustomization() -> Object:
    made: Object = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text(encoding="utf-8"))
    return made


OBJECTS: list[Object] = [
    one
    for name in kustomization()["resources"]
    for one in yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8"))
]


def of(kind: str) -> dict[str, Object]:
    return {one["metadata"]["name"]: one for one in OBJECTS if one["kind"] == kind}


def pod(name: str) -> Object:
    template: Object = of("Deployment")[name]["spec"]["template"]
    return template


def container(name: str) -> Object:
    (only,) = pod(name)["spec"]["containers"]
    made: Object = only
    return made


def named(one: Object) -> str:
    return f"{one['kind']}-{one['metadata']['name']}"


def test_every_manifest_is_in_the_kustomization() -> None:
    there = {path.name for path in MANIFESTS.glob("*.yaml")} - {"kustomization.yaml"}
    assert there == set(kustomization()["resources"])
    assert kustomization()["namespace"] in of("Namespace")


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("one", OBJECTS, ids=named)
def test_each_object_is_valid(one: Object, version: str) -> None:
    kubernetes_validate.validate(one, version, strict=True)


def test_the_schema_refuses_what_it_does_not_know() -> None:
    wrong = json.loads(json.dumps(of("Deployment")["vllm-router"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


@pytest.mark.parametrize("name", [*ENGINES, "vllm-router"])
def test_selectors_of_service_and_budget_meet_the_pods(name: str) -> None:
    labels = pod(name)["metadata"]["labels"]
    deployment, service = of("Deployment")[name], of("Service")[name]
    budget = of("PodDisruptionBudget")[name]
    for wanted in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
    ):
        assert wanted.items() <= labels.items()
    ports = {one["name"] for one in container(name)["ports"]}
    assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports
    assert deployment["spec"]["replicas"] > 1, "a budget for a single pod blocks every drain"


@pytest.mark.parametrize("name", ENGINES)
def test_engines_are_found_pod_by_pod_and_have_time_to_load(name: str) -> None:
    assert of("Service")[name]["spec"]["clusterIP"] == "None"
    probe = container(name)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    host = next(
        one for one in container(name)["env"] if one["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST"
    )
    assert host["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@pytest.mark.parametrize(
    ("name", "role"), [("vllm-prefill", "kv_producer"), ("vllm-decode", "kv_consumer")]
)
def test_engines_are_told_their_role(name: str, role: str) -> None:
    words = [*container(name)["command"], *container(name)["args"]]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "NixlConnector" and config["kv_role"] == role
    assert config["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True


def test_p_says_what_it_has_computed() -> None:
    """Else the router cannot tell a hit from a prompt that P has computed all the same."""
    assert "--enable-prompt-tokens-details" in container("vllm-prefill")["args"]


def test_clients_have_keys_of_their_own_where_the_secret_has_them() -> None:
    """Else all send the engines' key, are one tenant, and may ask engines past the router."""
    refs = {
        one["name"]: one["valueFrom"]["secretKeyRef"]
        for one in container("vllm-router")["env"]
        if "secretKeyRef" in one.get("valueFrom", {})
    }
    clients, engines = refs["VLLM_BIDIR_ROUTER_API_KEY"], refs["VLLM_BIDIR_ENGINE_API_KEY"]
    assert clients["optional"] and clients["name"] == engines["name"]
    assert clients["key"] != engines["key"]
    for name in ENGINES:
        (key,) = (one for one in container(name)["env"] if one["name"] == "VLLM_API_KEY")
        assert key["valueFrom"]["secretKeyRef"] == engines


@pytest.mark.parametrize("name", ENGINES)
def test_spans_of_p_and_d_can_be_told_apart(name: str) -> None:
    assert {"name": "OTEL_SERVICE_NAME", "value": name} in container(name)["env"]


def test_the_router_looks_for_the_services_that_there_are() -> None:
    words = dict(one.removeprefix("--").split("=") for one in container("vllm-router")["args"])
    for role, name in (("prefiller", ENGINES[0]), ("decoder", ENGINES[1])):
        assert words[f"{role}-host"] == f"dns:{name}"
        (port,) = of("Service")[name]["spec"]["ports"]
        assert int(words[f"{role}-port"]) == port["port"]


@pytest.mark.parametrize("name", ENGINES)
def test_a_pod_outlives_its_pre_stop_and_what_is_under_way(name: str) -> None:
    """What outlasts the engine's time hangs until the kill, so that one follows soon."""
    paused = int(container(name)["lifecycle"]["preStop"]["exec"]["command"][1])
    (flag,) = (one for one in container(name)["args"] if one.startswith("--shutdown-timeout="))
    left = pod(name)["spec"]["terminationGracePeriodSeconds"] - paused
    assert 40 <= left - 20 <= int(flag.partition("=")[2]) <= left - 10


@pytest.mark.parametrize("name", [*ENGINES, "vllm-router"])
def test_probes_ask_the_port_that_is_served(name: str) -> None:
    for probe in ("readinessProbe", "livenessProbe"):
        assert container(name)[probe]["httpGet"]["port"] == "http"


def test_side_channels_are_for_engines_only() -> None:
    (policy,) = of("NetworkPolicy").values()
    engine = policy["spec"]["podSelector"]["matchLabels"]
    assert all(engine.items() <= pod(name)["metadata"]["labels"].items() for name in ENGINES)
    assert not engine.items() <= pod("vllm-router")["metadata"]["labels"].items()
    peers, callers = policy["spec"]["ingress"]
    assert peers == {"from": [{"podSelector": {"matchLabels": engine}}]}
    assert [one["port"] for one in callers["ports"]] == ["http"]
    router = callers["from"][0]["podSelector"]["matchLabels"]
    assert router.items() <= pod("vllm-router")["metadata"]["labels"].items()


@pytest.mark.parametrize("name", [*ENGINES, "vllm-router"])
def test_pods_have_no_rights_that_they_do_not_need(name: str) -> None:
    assert pod(name)["spec"]["automountServiceAccountToken"] is False
    context = container(name)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
