{{- define "elastipod.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The release's name, with the chart's where it does not hold it already; short enough for a suffix. */}}
{{- define "elastipod.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "elastipod.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "elastipod.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Objects of the cluster, and of namespaces whose jobs the release runs, carry its namespace too: two releases may have one name. */}}
{{- define "elastipod.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "elastipod.fullname" .) }}
{{- end }}

{{- define "elastipod.serviceAccountName" -}}
{{- default (ternary (include "elastipod.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{/* As the API server knows the operator. */}}
{{- define "elastipod.username" -}}
{{- printf "system:serviceaccount:%s:%s" .Release.Namespace (include "elastipod.serviceAccountName" .) }}
{{- end }}

{{/* Whether a request comes from an operator, this one or one that the values name. For matchConditions. */}}
{{- define "elastipod.notByAnOperator" -}}
!(request.userInfo.username in [{{ include "elastipod.username" . | squote }}
{{- range .Values.admissionPolicy.otherOperators }}, {{ squote . }}{{ end }}])
{{- end }}

{{/* Whether the release runs a job (elastipod_operator.kube.scope). Takes a dict: object (what CEL calls the job), root. */}}
{{- define "elastipod.runs" -}}
((has({{ .object }}.metadata.annotations) && 'elastipod.io/controller' in {{ .object }}.metadata.annotations
? {{ .object }}.metadata.annotations['elastipod.io/controller'] : '')
in [{{ squote .root.Values.controller.name }}{{ if not .root.Values.controller.onlyNamed }}, ''{{ end }}])
{{- end }}

{{- define "elastipod.webhookName" -}}
{{- printf "%s-webhook" (include "elastipod.fullname" .) }}
{{- end }}

{{- define "elastipod.webhookHost" -}}
{{- printf "%s.%s.svc" (include "elastipod.webhookName" .) .Release.Namespace }}
{{- end }}

{{/* Selects the namespaces of watchNamespaces; empty for all. */}}
{{- define "elastipod.watchedNamespaces" -}}
{{- with .Values.watchNamespaces }}
namespaceSelector:
  matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson . }}}
{{- end }}
{{- end }}

{{- define "elastipod.installKeyName" -}}
{{- default (printf "%s-install-key" (include "elastipod.fullname" .)) .Values.authentication.existingSecret }}
{{- end }}

{{- define "elastipod.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end }}

{{- define "elastipod.selectorLabels" -}}
app.kubernetes.io/name: {{ include "elastipod.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Of the pod of `helm test`, which no Service leads to. */}}
{{- define "elastipod.testLabels" -}}
app.kubernetes.io/name: {{ include "elastipod.name" . | trunc 58 | trimSuffix "-" }}-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "elastipod.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "elastipod.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/component: operator
{{- end }}

{{/* What the operator may do with jobs, pods and events: in all namespaces, or in each of those that it watches. */}}
{{- define "elastipod.workRules" -}}
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs]
  # delete: finished jobs with ttlSecondsAfterFinished.
  verbs: [get, list, watch, patch, delete]
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs/status]
  verbs: [patch]
# Lets pods name their job as the owner that waits for them, where the cluster checks that.
- apiGroups: [sagemaker.amazonaws.com]
  resources: [hyperpodpytorchjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
{{- if .Values.authentication.enabled }}
# One with the key of each job, for its pods; none is ever read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- if .Values.kueue.enabled }}
# What jobs with a queue request from Kueue.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  # patch: their priority, when the job's class was edited.
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
# The one called default adopts jobs without a queue; jobs are warned of what is wrong with others.
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues]
  verbs: {{ ternary "[get, list]" "[get]" .Values.kueue.readQueues }}
{{- end }}
{{- end }}

{{/* A role and its binding to the operator's account. Takes a dict: kind (Role or ClusterRole), name, namespace, rules, root. */}}
{{- define "elastipod.grant" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}
metadata:
  name: {{ .name | quote }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels:
    {{- include "elastipod.labels" .root | nindent 4 }}
rules:
  {{- .rules | trim | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .kind }}Binding
metadata:
  name: {{ .name | quote }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels:
    {{- include "elastipod.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name | quote }}
subjects:
  - kind: ServiceAccount
    name: {{ include "elastipod.serviceAccountName" .root | quote }}
    namespace: {{ .root.Release.Namespace | quote }}
{{- end }}
