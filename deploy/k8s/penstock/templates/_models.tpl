{{/* Models that the release brings itself (`models`): who reads them, and from where. */}}

{{/* "yes" for roles that load models. */}}
{{- define "penstock.readsModels" -}}
{{- if and .root.Values.models (or (has .role (list "episodes" "trainer" "rollout")) (gt (int (dig "gpu" "count" 0 (index .root.Values .role))) 0)) }}yes{{ end -}}
{{- end -}}

{{/* Sources to download, separated by spaces. */}}
{{- define "penstock.fetched" -}}
{{- $sources := list -}}
{{- range .Values.models -}}
{{- if not (regexMatch "^(hf://[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[A-Za-z0-9_./-]+)?|s3://[a-z0-9][a-z0-9.-]+/[A-Za-z0-9_./=-]+|pvc://[a-z0-9][a-z0-9.-]*(/[A-Za-z0-9_./-]*)?)$" .) -}}
{{- fail (printf "expected models as hf://owner/name@revision, s3://bucket/prefix or pvc://claim/path, found %q: change `models`; an image of a registry (oci://) can be mounted with extraVolumes" .) -}}
{{- end -}}
{{- if not (hasPrefix "pvc://" .) }}{{ $sources = append $sources . }}{{ end -}}
{{- end -}}
{{- join " " $sources -}}
{{- end -}}

{{/* Claims that hold models already (pvc://claim/path), mounted at /var/penstock/claims/<claim>. */}}
{{- define "penstock.modelClaims" -}}
{{- $claims := list -}}
{{- range .Values.models }}{{ if hasPrefix "pvc://" . }}{{ $claims = append $claims (trimPrefix "pvc://" . | splitList "/" | first) }}{{ end }}{{ end -}}
{{- uniq $claims | join " " -}}
{{- end -}}

{{/* The claim that models are downloaded to; empty where none are. */}}
{{- define "penstock.modelClaim" -}}
{{- if include "penstock.fetched" . -}}
{{- if and (ne .Values.modelCache.accessMode "ReadWriteMany") (not (include "penstock.oneNode" .)) -}}
{{- fail (printf "expected modelCache.accessMode = ReadWriteMany, found %s: pods on several nodes read the models; change it, or keep the run on one node with storage.runs.accessMode = ReadWriteOnce" .Values.modelCache.accessMode) -}}
{{- end -}}
{{- default (include "penstock.name" (dict "root" . "role" "models")) .Values.modelCache.existingClaim -}}
{{- end -}}
{{- end -}}

{{/* The ServiceAccount of the Job that downloads: the trainer's, by which the cluster gives it a role, for a store without a secret. */}}
{{- define "penstock.modelsAccount" -}}
{{- if and (contains "s3://" (include "penstock.fetched" .)) (not .Values.modelCache.s3.existingSecret) -}}
{{- include "penstock.serviceAccount" (dict "root" . "role" (ternary "pod" "trainer" (eq (include "penstock.kind" .) "pod"))) -}}
{{- else -}}
{{- include "penstock.name" (dict "root" . "role" "models") -}}
{{- end -}}
{{- end -}}

{{/* "yes" where the JobSet downloads before it creates pods that hold GPUs. On a volume of one node the trainer chooses the node,
so its pod waits there. */}}
{{- define "penstock.modelsFirst" -}}
{{- if and (eq (include "penstock.kind" .) "jobset") (eq .Values.modelCache.accessMode "ReadWriteMany") (include "penstock.fetched" .) }}yes{{ end -}}
{{- end -}}
