"""The text that `elastipod recipe render` prints, as kubectl applies it and people read it."""

from __future__ import annotations

import io

import pytest

from elastipod.recipes.recipe_command import main

RECIPE = """\
run: {name: Märchen_8B}
trainer: {devices: 8, num_nodes: 2}
training_config:
  training_args:
    train_batch_size: 64
    prompt: >-
      Tell a Märchen of so many words that no line of eighty characters could ever hold them all.
    template: |
      first
      second
elastic_policy: {is_elastic: true, min_nodes: 2, max_nodes: 4, scaling_timeout: 600, graceful_shutdown_timeout: 900}
scale_config:
  2: {}
  4: {training_config: {training_args: {micro_train_batch_size: 1}}}
"""
RENDERED = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: training-config-m-rchen-8b
  namespace: ml
data:
  config.yaml: |
    run:
      name: Märchen_8B
    trainer:
      devices: 8
      num_nodes: 2
    training_config:
      training_args:
        train_batch_size: 64
        prompt: Tell a Märchen of so many words that no line of eighty characters could ever hold them all.
        template: |
          first
          second
  config-n2.yaml: |
    run:
      name: Märchen_8B
    trainer:
      devices: 8
      num_nodes: 2
    training_config:
      training_args:
        train_batch_size: 64
        prompt: Tell a Märchen of so many words that no line of eighty characters could ever hold them all.
        template: |
          first
          second
  config-n4.yaml: |
    run:
      name: Märchen_8B
    trainer:
      devices: 8
      num_nodes: 4
    training_config:
      training_args:
        train_batch_size: 64
        prompt: Tell a Märchen of so many words that no line of eighty characters could ever hold them all.
        template: |
          first
          second
        micro_train_batch_size: 1
---
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata:
  name: m-rchen-8b
  namespace: ml
  labels:
    app: m-rchen-8b
    kueue.x-k8s.io/queue-name: team
spec:
  nprocPerNode: '8'
  elasticPolicy:
    minReplicas: 2
    maxReplicas: 4
    replicaDiscreteValues:
    - 2
    - 4
    scalingTimeoutInSeconds: 600
    gracefulShutdownTimeoutInSeconds: 900
  elastipod:
    parallelism: 4
  replicaSpecs:
  - name: 2-nodes
    replicas: 2
    maxReplicas: 4
    template:
      metadata:
        labels:
          app: m-rchen-8b
      spec:
        containers:
        - name: pytorch
          image: example.com/train:1
          command:
          - hyperpodrun
          - train.py
          - --fast
          - --config-path=/config
          env:
          - name: A
            value: b=c
          - name: D
            value: e
          - name: HYPERPOD_SIGNAL_COORDINATION
            value: distributed
          resources:
            requests:
              nvidia.com/gpu: '8'
              vpc.amazonaws.com/efa: '32'
            limits:
              nvidia.com/gpu: '8'
              vpc.amazonaws.com/efa: '32'
          volumeMounts:
          - name: training-config
            mountPath: /config
          - name: fsx-volume
            mountPath: /data
          - name: logs-volume
            mountPath: /logs
        volumes:
        - name: training-config
          configMap:
            name: training-config-m-rchen-8b
        - name: fsx-volume
          persistentVolumeClaim:
            claimName: fsx
        - name: logs-volume
          persistentVolumeClaim:
            claimName: logs
        nodeSelector:
          node.kubernetes.io/instance-type: ml.p5.48xlarge
"""
LEAST = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: training-config-one
data:
  config.yaml: |
    run:
      name: one
    trainer:
      devices: 8
      num_nodes: 2
---
apiVersion: sagemaker.amazonaws.com/v1
kind: HyperPodPyTorchJob
metadata:
  name: one
  labels:
    app: one
spec:
  nprocPerNode: '8'
  replicaSpecs:
  - name: 2-nodes
    replicas: 2
    template:
      metadata:
        labels:
          app: one
      spec:
        containers:
        - name: pytorch
          image: i
          command:
          - hyperpodrun
          - train.py
          - --config-path=/config
          resources:
            requests:
              nvidia.com/gpu: '8'
            limits:
              nvidia.com/gpu: '8'
          volumeMounts:
          - name: training-config
            mountPath: /config
        volumes:
        - name: training-config
          configMap:
            name: training-config-one
"""


def test_an_elastic_recipe_with_every_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(RECIPE))
    status = main([
        "render", "-", "--image=example.com/train:1", "--script=train.py --fast", "--namespace=ml", "--queue=team",
        "--model-parallel=4", "--instance-type=ml.p5.48xlarge", "--resource=nvidia.com/gpu=8",
        "--resource=vpc.amazonaws.com/efa=32", "--claim=fsx:/data", "--claim=logs:/logs", "--env=A=b=c", "--env=D=e",
    ])  # fmt: skip
    assert (status, capsys.readouterr()) == (0, (RENDERED, ""))


def test_a_recipe_of_fixed_size_without_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("run: {name: one}\ntrainer: {devices: 8, num_nodes: 2}\n"))
    assert main(["render", "-", "--image=i", "--script=train.py"]) == 0
    assert capsys.readouterr() == (LEAST, "")
