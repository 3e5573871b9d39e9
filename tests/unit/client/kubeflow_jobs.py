"""Jobs of the kinds that Kubeflow's own examples have; also applied to a real API server after their conversion."""

from __future__ import annotations

MASTER_AND_WORKERS = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: mnist, namespace: team, labels: {kueue.x-k8s.io/queue-name: gpus}}
spec:
  runPolicy: {cleanPodPolicy: None, ttlSecondsAfterFinished: 60, backoffLimit: 3, schedulingPolicy: {minAvailable: 3}}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template: &template
        metadata: {annotations: {sidecar.istio.io/inject: "false"}}
        spec:
          containers:
            - name: pytorch
              image: example.com/mnist:1
              command: [python3, /opt/mnist.py, --epochs=1]
              resources: {limits: {nvidia.com/gpu: 1}}
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template: *template
"""
ELASTIC = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: imagenet}
spec:
  elasticPolicy: {rdzvBackend: c10d, minReplicas: 1, maxReplicas: 3, maxRestarts: 100, metrics: [{type: Resource}]}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - {name: proxy, image: "example.com/proxy:1"}
            - name: pytorch
              image: example.com/imagenet:1
              env: [{name: LOGLEVEL, value: DEBUG}]
              command: [python, -m, torch.distributed.run, --rdzv_backend=c10d, --nproc_per_node=4, ./imagenet.py]
              volumeMounts: [{name: data, mountPath: /data}]
          volumes: [{name: data, persistentVolumeClaim: {claimName: imagenet}}]
"""
IN_A_SHELL = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: fsdp}
spec:
  nprocPerNode: "8"
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      restartPolicy: ExitCode
      template:
        spec:
          containers:
            - name: pytorch
              image: example.com/fsdp:1
              command: [bash, -c, "pip list && torchrun --nnodes 4 train.py"]
"""
TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: finetune}
spec:
  runtimeRef: {name: torch-distributed, kind: ClusterTrainingRuntime, apiGroup: trainer.kubeflow.org}
  suspend: true
  labels: {team: nlp}
  trainer:
    numNodes: 3
    numProcPerNode: 2
    image: example.com/finetune:1
    command: [torchrun, train.py]
    env: [{name: EPOCHS, value: "3"}]
    resourcesPerNode: {limits: {nvidia.com/gpu: 2}}
"""
RUNTIME = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch-distributed}
spec:
  mlPolicy: {numNodes: 2, torch: {numProcPerNode: auto}}
  template:
    spec:
      replicatedJobs:
        - name: dataset-initializer
          template: {spec: {template: {spec: {containers: [{name: dataset-initializer, image: "example.com/init:1"}]}}}}
        - name: node
          template:
            spec:
              template:
                spec:
                  serviceAccountName: trainer
                  containers: [{name: node, image: "example.com/torch:2", command: [torchrun, /workspace/train.py]}]
"""
OF_A_RUNTIME = (
    RUNTIME
    + """
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: from-runtime}
spec:
  runtimeRef: {name: torch-distributed}
  initializer: {dataset: {storageUri: "hf://team/data"}}
  podTemplateOverrides: [{targetJobs: [{name: node}], spec: {nodeSelector: {pool: gpu}}}]
"""
)
JOBS = {
    "master and workers": MASTER_AND_WORKERS,
    "elastic": ELASTIC,
    "in a shell": IN_A_SHELL,
    "TrainJob": TRAIN_JOB,
    "of a runtime": OF_A_RUNTIME,
}
