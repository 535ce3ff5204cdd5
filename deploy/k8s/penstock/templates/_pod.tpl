{{/*
One pod of one role: dict "root" $ "role" "rollout", and in a JobSet "jobSet", its name. Every pod passes the restricted Pod
Security Standard unless a value of its role's securityContext, podSecurityContext or hostNetwork says otherwise.
*/}}

{{- define "penstock.pod" -}}
{{- $root := .root -}}{{- $role := .role -}}{{- $own := index $root.Values $role -}}
{{- $gpus := int (dig "gpu" "count" 0 $own) -}}
metadata:
  labels:
    {{- mergeOverwrite (include "penstock.podLabels" . | fromYaml) (include "penstock.value" (merge (dict "key" "podLabels") .) | fromYaml) | toYaml | nindent 4 }}
  {{- $annotations := include "penstock.value" (merge (dict "key" "podAnnotations") .) | fromYaml }}
  {{- if not (or (hasKey . "jobSet") (eq $role "pod")) }}{{ $_ := set $annotations "checksum/run" (sha256sum $root.Values.run.config) }}{{ end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "penstock.serviceAccount" . }}
  {{- if include "penstock.value" (merge (dict "key" "hostNetwork") .) }}
  {{- if and $root.Values.networkPolicy.enabled (not $root.Values.networkPolicy.nodes) (ne $role "pod") }}
  {{- fail (printf "expected networkPolicy.nodes with %s.hostNetwork, found none: to NetworkPolicies, what such a pod sends comes from its node; name the CIDRs of the nodes, or set networkPolicy.enabled to false" $role) }}
  {{- end }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  automountServiceAccountToken: {{ and (eq $role "coordinator") (ne (include "penstock.released" $root) "[]") }}
  enableServiceLinks: false
  {{- if or (hasKey . "jobSet") (eq $role "pod") }}
  restartPolicy: Never  # which a podFailurePolicy needs
  {{- end }}
  # What the service may take to drain, ten seconds until it ends itself, and preStop.
  terminationGracePeriodSeconds: {{ include "penstock.grace" . }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $key := list "priorityClassName" "runtimeClassName" "schedulerName" }}
  {{- with include "penstock.value" (dict "root" $root "role" $role "key" $key) }}
  {{ $key }}: {{ . }}
  {{- end }}
  {{- end }}
  securityContext: {{- include "penstock.podSecurity" . | nindent 4 }}
  {{- with include "penstock.placement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- $security := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) }}
  {{- $security = mergeOverwrite $security (include "penstock.value" (merge (dict "key" "securityContext") .) | fromYaml) }}
  {{- $fetches := include "penstock.readsModels" . }}
  {{- $waits := and $fetches (include "penstock.fetched" $root) (not (and (hasKey . "jobSet") (include "penstock.modelsFirst" $root))) }}
  {{- if or $gpus $waits }}
  initContainers:
    {{- if $gpus }}
    # Before a model is loaded: one sentence for what the node lacks.
    - name: preflight
      image: {{ include "penstock.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: ["python", "-m", "penstock.shared.preflight", "--gpu"{{ if dig "rdma" "resource" "" $own }}, "--rdma"{{ end }}]
      terminationMessagePolicy: FallbackToLogsOnError
      env:
        - {name: HOME, value: /tmp}
        - {name: USER, value: penstock}
        {{- with include "penstock.value" (merge (dict "key" "extraEnv") .) }}
        {{- . | nindent 8 }}
        {{- end }}
      resources:
        {{- include "penstock.resources" (merge (dict "gpus" $gpus) .) | nindent 8 }}
      securityContext: {{- toYaml $security | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- with include "penstock.value" (merge (dict "key" "extraVolumeMounts") .) }}
        {{- . | nindent 8 }}
        {{- end }}
    {{- end }}
    {{- if $waits }}
    - name: models
      image: {{ include "penstock.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{ concat (list "python" "-m" "penstock.shared.model.fetch" "--wait" "--into" "/var/penstock/models") (splitList " " (include "penstock.fetched" $root)) | toJson }}
      resources:
        requests: {cpu: 10m, memory: 64Mi, ephemeral-storage: 1Gi}
        limits: {memory: 256Mi}
      securityContext: {{- toYaml $security | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: /var/penstock/models, readOnly: true}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ include "penstock.image" . | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{ include "penstock.command" . }}
      env:
        {{- include "penstock.environment" . | nindent 8 }}
      {{- if and (has $role (list "tracking" "pod")) $root.Values.tracking.existingSecret }}
      envFrom: [{secretRef: {name: {{ $root.Values.tracking.existingSecret }}}}]
      {{- end }}
      ports:
        {{- include "penstock.ports" . | nindent 8 }}
      {{- include "penstock.probes" . | nindent 6 }}
      {{- if has $role (list "coordinator" "executor") }}
      lifecycle:
        # Clients hear that this endpoint is gone before it goes.
        preStop: {exec: {command: ["sleep", "3"]}}
      {{- end }}
      resources:
        {{- include "penstock.resources" (merge (dict "gpus" $gpus) .) | nindent 8 }}
      securityContext: {{- toYaml $security | nindent 8 }}
      volumeMounts:
        {{- include "penstock.mounts" . | nindent 8 }}
  volumes:
    {{- include "penstock.volumes" . | nindent 4 }}
{{- end -}}

{{/* On SIGTERM `penstock up` stops its services at the same time, then executor (15 s) and bus (10 s) (services/up/plan.py). */}}
{{- define "penstock.grace" -}}
{{- add (int .root.Values.bus.drainSeconds) (ternary 45 20 (eq .role "pod")) -}}
{{- end -}}

{{- define "penstock.command" -}}
{{- if eq .role "executor" -}}
["python", "-m", "penstock.services.reward.executor", "--config", "/etc/penstock/run.toml"]
{{- else if and (eq .role "rollout") (include "penstock.leaderWorkerSet" .root) -}}
["python", "-m", "penstock.services.rollout", "--config", "/etc/penstock/run.toml", "--replica", "{{ include "penstock.name" . }}-$(GROUP_INDEX)"]
{{- else if eq .role "pod" -}}
{{- $folder := printf "/var/penstock/runs/%s" (include "penstock.runId" .root) -}}
["sh", "-c", "if [ -e {{ $folder }}/settings.toml ]; then set -- --resume {{ $folder }}; fi; exec python -m penstock.services.cli up /etc/penstock/run.toml \"$@\""]
{{- else if hasKey . "jobSet" -}}
["python", "-m", "penstock.services.{{ .role }}", "--config", "/etc/penstock/run.toml", "--replica", "{{ .role }}{{ with include "penstock.pool" . }}-{{ . }}{{ end }}-$(JOB_INDEX)"]
{{- else -}}
["python", "-m", "penstock.services.{{ .role }}", "--config", "/etc/penstock/run.toml", "--replica", "$(POD_NAME)"]
{{- end -}}
{{- end -}}

{{/* Only addresses, paths and secrets: how the run trains stands in its TOML. The executor knows neither bus nor run folder. */}}
{{- define "penstock.environment" -}}
{{- $values := .root.Values -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: HOME, value: /tmp}
- {name: USER, value: penstock}
- {name: XDG_CACHE_HOME, value: /var/penstock/cache}
- {name: HF_HOME, value: /var/penstock/cache/huggingface}
- {name: TRITON_CACHE_DIR, value: /var/penstock/cache/triton}
- {name: PYTHONUNBUFFERED, value: "1"}
- {name: TOKENIZERS_PARALLELISM, value: "false"}
- {name: PENSTOCK__RUN__METRICS_PORT, value: "9400"}
{{- if eq .role "executor" }}
- {name: PENSTOCK__REWARD__EXECUTOR__ADDRESS, value: "$(POD_IP):9500"}
- {name: PENSTOCK__REWARD__EXECUTOR__SECRET_FILE, value: /etc/penstock/executor/secret}
{{- else }}
- {name: PENSTOCK__RUN__ID, value: {{ include "penstock.runId" .root | quote }}}
- {name: PENSTOCK__RUN__FOLDER, value: /var/penstock/runs}
- {name: PENSTOCK__BUS__DRAIN_S, value: {{ $values.bus.drainSeconds | quote }}}
{{- if ne .role "pod" }}
- {name: PENSTOCK__WEIGHTS__FOLDER, value: {{ printf "/var/penstock/runs/%s/weights" (include "penstock.runId" .root) }}}
- {name: PENSTOCK__INTERNAL__START_WAIT_S, value: "300"}
- {name: PENSTOCK__INTERNAL__OWNER, value: {{ printf "%s/%s" .root.Release.Namespace .root.Release.Name }}}
- name: PENSTOCK__BUS__URL
  valueFrom: {secretKeyRef: {name: {{ include "penstock.busSecret" .root }}, key: url}}
{{- end }}
{{- if hasKey . "jobSet" }}
- {name: JOB_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}}
# A Job does not restart what ended with 0: a pod that is evicted must not count as done.
- {name: PENSTOCK__INTERNAL__STOPPED_EXIT_STATUS, value: "143"}
{{- if and (eq .role "trainer") (eq $values.run.onFinish "release") }}
- {name: PENSTOCK__INTERNAL__LEAVE_WHEN_OVER, value: "true"}
{{- end }}
{{- end }}
{{- if has .role (list "coordinator" "pod") }}
{{- with $values.run.activeDeadlineSeconds }}
- {name: PENSTOCK__INTERNAL__DEADLINE_S, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if eq .role "coordinator" }}
{{- if ne (include "penstock.released" .root) "[]" }}
- {name: PENSTOCK__INTERNAL__RELEASE, value: {{ include "penstock.released" .root | quote }}}
- {name: PENSTOCK__INTERNAL__POD_TEMPLATE, valueFrom: {fieldRef: {fieldPath: "metadata.labels['pod-template-hash']"}}}
{{- end }}
{{- end }}
{{- if has .role (list "coordinator" "pod") }}
- {name: PENSTOCK__COORDINATOR__HOST, value: "0.0.0.0"}
- {name: PENSTOCK__COORDINATOR__PORT, value: "8000"}
- {name: PENSTOCK__COORDINATOR__TOKEN_FILE, value: /etc/penstock/api/token}
{{- end }}
{{- if include "penstock.hasShelf" . }}
- {name: PENSTOCK__INTERNAL__SHELF_FOLDER, value: /var/penstock/shelf}
- {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}  # a copy is best on another
{{- end }}
{{- if eq .role "episodes" }}
- {name: PENSTOCK__EPISODES__LISTEN, value: "$(POD_IP):8100"}  # a key is good at its own pod
{{- end }}
{{- if include "penstock.usesExecutor" . }}
- {name: PENSTOCK__REWARD__EXECUTOR__ADDRESS, value: {{ printf "%s:9500" (include "penstock.name" (dict "root" .root "role" "executor")) }}}
- {name: PENSTOCK__REWARD__EXECUTOR__SECRET_FILE, value: /etc/penstock/executor/secret}
{{- end }}
{{- if and (eq .role "rollout") (include "penstock.leaderWorkerSet" .root) }}
# LeaderWorkerSet puts the variables that these refer to before all others.
- {name: GROUP_INDEX, valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}}
- {name: PENSTOCK__ROLLOUT__NODES, value: {{ $values.rollout.nodes | quote }}}
- {name: PENSTOCK__ROLLOUT__NODE, value: $(LWS_WORKER_INDEX)}
- {name: PENSTOCK__ROLLOUT__RENDEZVOUS, value: "$(LWS_LEADER_ADDRESS):29500"}
- {name: PENSTOCK__ROLLOUT__SECRET_FILE, value: /etc/penstock/rollout/secret}
{{- end }}
{{- if and (include "penstock.readsModels" .) (contains "hf://" (include "penstock.fetched" .root)) }}
# A hub name in the run's TOML is then found here, and nowhere else.
- {name: HF_HUB_CACHE, value: /var/penstock/models/huggingface}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if eq .role "rollout" }}
{{- range $name, $value := .root.Values.rollout.engine }}
- {name: PENSTOCK__ROLLOUT__VLLM__{{ upper $name }}, value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}}
{{- end }}
{{- end }}
{{- if and (has .role (list "trainer" "pod")) (eq $values.fabric.require "rdma") }}
- {name: PENSTOCK__FABRIC__REQUIRE, value: rdma}
{{- end }}
{{- if has .role (list "trainer" "pod") }}
{{- include "penstock.storeEnvironment" .root }}
{{- end }}
{{- if eq .role "trainer" }}
{{- with int $values.trainer.gpu.count }}
- {name: PENSTOCK__TRAINER__RANKS, value: {{ . | quote }}}
{{- end }}
{{- include "penstock.hosts" . }}
{{- end }}
{{- end }}
{{- with include "penstock.value" (merge (dict "key" "extraEnv") .) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Which of the trainer's hosts a pod is, and where they meet: in its StatefulSet or in a JobSet (`jobSet`: its name). */}}
{{- define "penstock.hosts" -}}
{{- $own := include "penstock.name" . -}}
{{- if gt (int .root.Values.trainer.nodes) 1 }}
- {name: PENSTOCK__TRAINER__NODES, value: {{ .root.Values.trainer.nodes | quote }}}
{{- if hasKey . "jobSet" }}
- {name: PENSTOCK__TRAINER__NODE, value: $(JOB_INDEX)}
- {name: PENSTOCK__TRAINER__RENDEZVOUS, value: "{{ .jobSet }}-trainer-0-0.{{ .jobSet }}:29500"}
{{- else }}
- {name: PENSTOCK__TRAINER__NODE, valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}}
- {name: PENSTOCK__TRAINER__RENDEZVOUS, value: "{{ $own }}-0.{{ $own }}:29500"}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.ports" -}}
- {name: metrics, containerPort: 9400}
{{- if eq .role "pod" }}
{{- range include "penstock.processes" .root | fromJsonArray | rest }}
- {name: {{ .portName }}, containerPort: {{ .port }}}
{{- end }}
{{- end }}
{{- if has .role (list "coordinator" "pod") }}
- {name: http, containerPort: 8000}
{{- end }}
{{- if eq .role "episodes" }}
- {name: turns, containerPort: 8100}
{{- end }}
{{- if eq .role "executor" }}
- {name: jobs, containerPort: 9500}
{{- end }}
{{- if and (has .role (list "trainer" "rollout")) (gt (int (index .root.Values .role).nodes) 1) }}
- {name: rendezvous, containerPort: 29500}
{{- end }}
{{- end -}}

{{/* The seconds that a role's pod may take to start; one with GPUs loads models. */}}
{{- define "penstock.startupSeconds" -}}
{{- $own := index .root.Values .role -}}
{{- $loads := and (eq .role "reward") (gt (int $own.gpu.count) 0) -}}
{{- max (int $own.startupSeconds) (ternary 2700 0 $loads) -}}
{{- end -}}

{{- define "penstock.probes" -}}
{{- $budget := include "penstock.startupSeconds" . | int -}}
{{- $port := ternary "http" "metrics" (eq .role "pod") -}}
startupProbe:
  httpGet: {path: /readyz, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div $budget 5) }}
readinessProbe:
  httpGet: {path: /readyz, port: {{ $port }}}
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  # Asks nothing of the bus: a bus that is away is no reason to restart those who wait for it.
  httpGet: {path: /healthz, port: {{ $port }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "penstock.resources" -}}
{{- $own := index .root.Values .role -}}
{{- $devices := dict -}}
{{- if .gpus }}{{ $_ := set $devices $own.gpu.resource .gpus }}{{ end -}}
{{- if dig "rdma" "resource" "" $own }}{{ $_ := set $devices $own.rdma.resource (int $own.rdma.count) }}{{ end -}}
{{- $onNode := and (include "penstock.hasShelf" .) (not .root.Values.storage.shelves.storageClass) -}}
{{- $disk := ternary (printf "%dMi" (add (include "penstock.shelfMebibytes" .root) 1024)) "1Gi" (not (empty $onNode)) -}}
requests:
  {{- toYaml (merge (deepCopy $devices) $own.resources.requests (dict "ephemeral-storage" $disk)) | nindent 2 }}
limits:
  {{- toYaml (merge (deepCopy $devices) $own.resources.limits) | nindent 2 }}
{{- end -}}

{{- define "penstock.mounts" -}}
- {name: run, mountPath: /etc/penstock/run.toml, subPath: run.toml, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if and (include "penstock.readsModels" .) (include "penstock.modelClaim" .root) }}
- {name: models, mountPath: /var/penstock/models, readOnly: true}
- {name: models, mountPath: /var/penstock/cache, subPath: compiled/{{ .role }}}  # kernels that another replica compiled
{{- else }}
- {name: cache, mountPath: /var/penstock/cache}
{{- end }}
{{- if include "penstock.readsModels" . }}
{{- range $claim := splitList " " (include "penstock.modelClaims" .root) | compact }}
- {name: {{ printf "claim-%s" $claim | trunc 63 }}, mountPath: /var/penstock/claims/{{ $claim }}, readOnly: true}
{{- end }}
{{- end }}
{{- if has .role (list "coordinator" "pod") }}
- {name: api, mountPath: /etc/penstock/api, readOnly: true}
{{- end }}
{{- if and (eq .role "rollout") (include "penstock.leaderWorkerSet" .root) }}
- {name: engine, mountPath: /etc/penstock/rollout, readOnly: true}
{{- end }}
{{- if or (eq .role "executor") (include "penstock.usesExecutor" .) }}
- {name: executor, mountPath: /etc/penstock/executor, readOnly: true}
{{- end }}
{{- if has .role (list "coordinator" "trainer" "rollout" "tracking" "pod") }}
- {name: runs, mountPath: /var/penstock/runs{{ if eq .role "rollout" }}, readOnly: true{{ end }}}
{{- end }}
{{- if include "penstock.hasShelf" . }}
- {name: shelf, mountPath: /var/penstock/shelf}
{{- end }}
{{- if and .root.Values.storage.data.existingClaim (ne .role "executor") }}
- {name: data, mountPath: /var/penstock/data, readOnly: true}
{{- end }}
{{- if and .root.Values.bus.caSecret (ne .role "executor") }}
- {name: bus-ca, mountPath: /etc/penstock/bus-ca, readOnly: true}
{{- end }}
{{- if (index .root.Values .role).shm }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with include "penstock.value" (merge (dict "key" "extraVolumeMounts") .) }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "penstock.volumes" -}}
{{- $values := .root.Values -}}
- name: run
  {{- if eq .role "executor" }}
  configMap: {name: {{ include "penstock.name" . }}}
  {{- else }}
  secret: {secretName: {{ include "penstock.name" (dict "root" .root "role" "run") }}}
  {{- end }}
- {name: tmp, emptyDir: {sizeLimit: 10Gi}}
{{- if and (include "penstock.readsModels" .) (include "penstock.modelClaim" .root) }}
- name: models
  persistentVolumeClaim: {claimName: {{ include "penstock.modelClaim" .root }}}
{{- else }}
- {name: cache, emptyDir: {sizeLimit: {{ $values.modelCache.size }}}}
{{- end }}
{{- if include "penstock.readsModels" . }}
{{- range $claim := splitList " " (include "penstock.modelClaims" .root) | compact }}
- name: {{ printf "claim-%s" $claim | trunc 63 }}
  persistentVolumeClaim: {claimName: {{ $claim }}, readOnly: true}
{{- end }}
{{- end }}
{{- if has .role (list "coordinator" "pod") }}
- name: api
  secret: {secretName: {{ include "penstock.apiSecret" .root }}, defaultMode: 0440}
{{- end }}
{{- if and (eq .role "rollout") (include "penstock.leaderWorkerSet" .root) }}
- name: engine
  secret: {secretName: {{ include "penstock.rolloutSecret" .root }}, defaultMode: 0440}
{{- end }}
{{- if or (eq .role "executor") (include "penstock.usesExecutor" .) }}
- name: executor
  secret: {secretName: {{ include "penstock.executorSecret" .root }}, defaultMode: 0440}
{{- end }}
{{- if has .role (list "coordinator" "trainer" "rollout" "tracking" "pod") }}
{{ include "penstock.runsVolume" .root }}
{{- end }}
{{- if include "penstock.hasShelf" . }}
- name: shelf
  {{- $size := printf "%sMi" (include "penstock.shelfMebibytes" .root) }}
  {{- with $values.storage.shelves.storageClass }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        storageClassName: {{ . }}
        resources: {requests: {storage: {{ $size }}}}
  {{- else }}
  emptyDir: {sizeLimit: {{ $size }}}
  {{- end }}
{{- end }}
{{- if and $values.storage.data.existingClaim (ne .role "executor") }}
- name: data
  persistentVolumeClaim: {claimName: {{ $values.storage.data.existingClaim }}, readOnly: true}
{{- end }}
{{- if and $values.bus.caSecret (ne .role "executor") }}
- name: bus-ca
  secret: {secretName: {{ $values.bus.caSecret }}}
{{- end }}
{{- with (index $values .role).shm }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with include "penstock.value" (merge (dict "key" "extraVolumes") .) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Where a pod may run: pools by label, GPU taints, one fabric for trainer and rollout. */}}
{{- define "penstock.placement" -}}
{{- $root := .root -}}{{- $own := index $root.Values .role -}}
{{- $gpu := default dict $own.gpu -}}
{{- $selector := fromYaml (include "penstock.value" (merge (dict "key" "nodeSelector") .)) -}}
{{- if and $gpu.count $gpu.product }}{{ $_ := set $selector "nvidia.com/gpu.product" $gpu.product }}{{ end -}}
{{- with include "penstock.nodeSelector" (dict "root" $root "own" $selector) | fromJson }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := fromYamlArray (include "penstock.value" (merge (dict "key" "tolerations") .)) -}}
{{- $trainer := $root.Values.trainer -}}
{{- if and (has .role (list "coordinator" "tracking")) (include "penstock.oneNode" $root) }}
{{- $tolerations = uniq (concat $tolerations (fromYamlArray (include "penstock.value" (dict "root" $root "role" "trainer" "key" "tolerations")))) }}
{{- if $trainer.gpu.count }}{{ $tolerations = append $tolerations (dict "key" $trainer.gpu.resource "operator" "Exists" "effect" "NoSchedule") }}{{ end -}}
{{- end -}}
{{- if $gpu.count }}{{ $tolerations = append $tolerations (dict "key" $gpu.resource "operator" "Exists" "effect" "NoSchedule") }}{{ end -}}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "penstock.value" (merge (dict "key" "topologySpreadConstraints") .) }}
topologySpreadConstraints: {{- . | nindent 2 }}
{{- end }}
{{- $affinity := fromYaml (include "penstock.value" (merge (dict "key" "affinity") .)) -}}
{{- $together := list -}}
{{- if and $root.Values.fabric.topologyKey (has .role (list "trainer" "rollout")) }}
{{- $together = append $together (include "penstock.beside" (dict "root" $root "key" $root.Values.fabric.topologyKey "roles" (list "trainer" "rollout")) | fromYaml) }}
{{- end }}
{{- /* The trainer chooses the node of a volume that one node at a time can mount; the others follow it there. */}}
{{- if and (include "penstock.oneNode" $root) (has .role (list "coordinator" "trainer" "rollout" "tracking")) }}
{{- $all := list "coordinator" "trainer" "rollout" "tracking" }}
{{- $roles := get (dict "trainer" $all "rollout" (list "trainer") "coordinator" (list (ternary "coordinator" "trainer" (hasKey . "stage"))) "tracking" (list "coordinator")) .role }}
{{- $together = append $together (include "penstock.beside" (dict "root" $root "key" "kubernetes.io/hostname" "roles" $roles) | fromYaml) }}
{{- end }}
{{- with $together }}
{{- $pods := default dict $affinity.podAffinity }}
{{- $required := concat (default list $pods.requiredDuringSchedulingIgnoredDuringExecution) . }}
{{- $_ := set $affinity "podAffinity" (set $pods "requiredDuringSchedulingIgnoredDuringExecution" $required) }}
{{- end }}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where a pod that is of no role runs, by `defaults`: dict "root" $, and "beside" the role on whose node it must be, or "". */}}
{{- define "penstock.defaultPlacement" -}}
{{- $all := dict -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" -}}
{{- with index $.root.Values.defaults $key }}{{ $_ := set $all $key (ternary (deepCopy .) . (kindIs "map" .)) }}{{ end -}}
{{- end -}}
{{- with .beside -}}
{{- $own := index $.root.Values . -}}
{{- with $own.nodeSelector }}{{ $_ := set $all "nodeSelector" . }}{{ end -}}
{{- $taint := dict "key" $own.gpu.resource "operator" "Exists" "effect" "NoSchedule" -}}
{{- $_ := set $all "tolerations" (append (default (default list $all.tolerations) $own.tolerations) $taint) -}}
{{- $affinity := default dict $all.affinity -}}
{{- $pods := default dict $affinity.podAffinity -}}
{{- $term := include "penstock.beside" (dict "root" $.root "key" "kubernetes.io/hostname" "roles" (list .)) | fromYaml -}}
{{- $_ := set $pods "requiredDuringSchedulingIgnoredDuringExecution" (append (default list $pods.requiredDuringSchedulingIgnoredDuringExecution) $term) -}}
{{- $_ := set $all "affinity" (set $affinity "podAffinity" $pods) -}}
{{- end -}}
{{- with include "penstock.nodeSelector" (dict "root" $.root "own" $all.nodeSelector) | fromJson }}{{ $_ := set $all "nodeSelector" . }}{{ end -}}
{{- with $all }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* One term of a podAffinity, as JSON: beside pods of these roles of the release. */}}
{{- define "penstock.beside" -}}
{{- dict "topologyKey" .key "labelSelector" (dict
      "matchLabels" (dict "app.kubernetes.io/instance" .root.Release.Name)
      "matchExpressions" (list (dict "key" "app.kubernetes.io/component" "operator" "In" "values" .roles))) | toJson -}}
{{- end -}}

{{/* "yes" where the run's volume can be mounted on one node at a time only. */}}
{{- define "penstock.oneNode" -}}
{{- if and (ne .Values.storage.runs.accessMode "ReadWriteMany") (not (include "penstock.ownFolders" .)) -}}
{{- if gt (add (int .Values.trainer.nodes) (int .Values.rollout.nodes)) 2 -}}
{{- fail (printf "expected storage.runs.accessMode = ReadWriteMany with trainer.nodes = %d and rollout.nodes = %d, found %s: a volume that one node mounts cannot serve several; change the access mode, or use one node" (int .Values.trainer.nodes) (int .Values.rollout.nodes) .Values.storage.runs.accessMode) -}}
{{- end -}}
yes
{{- end -}}
{{- end -}}

{{/* The name of a role's ServiceAccount: dict "root" $ "role" …. */}}
{{- define "penstock.serviceAccount" -}}
{{- $own := fromYaml (include "penstock.value" (merge (dict "key" "serviceAccount") .)) -}}
{{- default (printf "%s-%s" (include "penstock.fullname" .root) .role) $own.name -}}
{{- end -}}
