{{/* Checkpoints in object storage (checkpoints.s3): the run's folder is then each pod's own, unless a claim is named. */}}

{{- define "penstock.ownFolders" -}}
{{- if and .Values.checkpoints.s3.uri (not .Values.storage.runs.existingClaim) -}}
{{- if gt (int .Values.trainer.nodes) 1 -}}
{{- fail (printf "expected storage.runs.existingClaim with checkpoints.s3.uri and trainer.nodes = %d, found none: pods that train together share the run's folder; name a ReadWriteMany claim, or train on one node" (int .Values.trainer.nodes)) -}}
{{- end -}}
true
{{- end -}}
{{- end -}}

{{- define "penstock.runsVolume" -}}
- name: runs
  {{- if include "penstock.ownFolders" . }}
  emptyDir: {sizeLimit: {{ .Values.storage.runs.size }}}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ include "penstock.runsClaim" . }}}
  {{- end }}
{{- end -}}

{{/* Without a secret the trainer asks as whom its pod is known: boto3 finds the role that the cluster gives its ServiceAccount. */}}
{{- define "penstock.storeEnvironment" -}}
{{- with .Values.checkpoints.s3 }}
{{- if .uri }}
- {name: PENSTOCK__TRAINER__STORE__URI, value: {{ .uri | quote }}}
{{- with .endpoint }}
- {name: PENSTOCK__TRAINER__STORE__ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .region }}
- {name: AWS_REGION, value: {{ . | quote }}}
{{- end }}
{{- with .existingSecret }}
{{- range $name := list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- name: {{ $name }}
  valueFrom: {secretKeyRef: {name: {{ $.Values.checkpoints.s3.existingSecret }}, key: {{ $name }}}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The port at which the store answers. */}}
{{- define "penstock.storePort" -}}
{{- include "penstock.portOf" (default "https://s3" .Values.checkpoints.s3.endpoint) -}}
{{- end -}}

{{- define "penstock.portOf" -}}
{{- $url := urlParse . -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- default (ternary "80" "443" (eq $url.scheme "http")) $port -}}
{{- end -}}
