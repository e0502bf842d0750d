"""What a cluster is given: manifests that Kubernetes' own schemas accept, and an image whose sources are there."""

import re

import pytest
import yaml
from launching import ROOT


def manifests() -> dict[str, list[dict]]:
    """By source: the manifest of the page, and the Job that the JobSet makes."""
    page = (ROOT / "docs" / "multihost.md").read_text()
    (printed,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (jobs,) = job_set()["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train"}, "spec": jobs["template"]["spec"]}
    return {"page": list(yaml.safe_load_all(printed)), "job set": [job]}


def job_set() -> dict:
    return yaml.safe_load((ROOT / "scripts" / "jobset.yaml").read_text())


@pytest.mark.parametrize("source", ["page", "job set"])
def test_kubernetes_takes_the_manifest(source):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests()[source]:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("source", ["page", "job set"])
def test_the_pods_are_as_many_as_the_processes_and_find_the_first(source):
    job = manifests()[source][-1]
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables["MPMD_NUM_PROCESSES"])
    network = job_set()["metadata"]["name"] if source == "job set" else spec["template"]["spec"]["subdomain"]
    jobs = f"{job_set()['spec']['replicatedJobs'][0]['name']}-0-" if source == "job set" else ""
    assert variables["MPMD_COORDINATOR"] == f"{network}-{jobs}0.{network}:5000"


def test_the_image_is_built_from_what_is_there():
    text = (ROOT / "scripts" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
    extras = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"'\.\[(.*?)\]'", text)[0].split(","):
        assert f"\n{extra} = [" in extras
