{{/* Names, labels and images; nothing here renders an object. */}}

{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The name of one role's objects: dict "root" $ "role" "rollout". A pool's leaves room within the 52 characters of a
StatefulSet, as LeaderWorkerSet makes one for each group, named <name>-<group>. */}}
{{- define "penstock.name" -}}
{{- $name := printf "%s-%s" (include "penstock.fullname" .root) .role -}}
{{- with include "penstock.pool" . -}}
{{- $name = printf "%s-%s" $name . -}}
{{- if gt (len $name) 48 }}{{ $name = printf "%s-%s" ($name | trunc 41 | trimSuffix "-") ($name | sha256sum | trunc 6) }}{{ end -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The pool whose values `root` has, or empty. */}}
{{- define "penstock.pool" -}}
{{- if eq .role "rollout" }}{{ dig "name" "" .root.Values.rollout }}{{ end -}}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- with include "penstock.pool" . }}
penstock/pool: {{ . }}
{{- end }}
{{- with .stage }}
penstock/stage: {{ . }}
{{- end }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: nothing that changes with the chart, or every upgrade would restart every pod. A mesh's sidecar would keep a Job's
pod from ending, and pods without one could not reach those with one: by default none has any. */}}
{{- define "penstock.podLabels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/part-of: penstock
{{ merge (deepCopy .root.Values.commonLabels) (dict "sidecar.istio.io/inject" "false") | toYaml }}
{{- end -}}

{{/* A pod's securityContext, changed by a role's (or `defaults`): dict "root" $ "role" "defaults". OpenShift chooses user and groups
from the namespace's range, and admits no others. */}}
{{- define "penstock.podSecurity" -}}
{{- $own := dict "runAsNonRoot" true "fsGroupChangePolicy" "OnRootMismatch" "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- if not (.root.Capabilities.APIVersions.Has "security.openshift.io/v1") -}}
{{- $_ := merge $own (dict "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001) -}}
{{- end -}}
{{- mergeOverwrite $own (include "penstock.value" (dict "root" .root "role" .role "key" "podSecurityContext") | fromYaml) | toYaml -}}
{{- end -}}

{{/* A nodeSelector, as JSON, with the architecture of the images: dict "root" $ "own" a nodeSelector. */}}
{{- define "penstock.nodeSelector" -}}
{{- $own := default dict .own | deepCopy -}}
{{- with .root.Values.image.arch }}{{ $own = merge $own (dict "kubernetes.io/arch" .) }}{{ end -}}
{{- $own | toJson -}}
{{- end -}}

{{- define "penstock.registry" -}}
{{- required "expected image.registry, found none: set it to the registry that holds your images (docs/kubernetes.md says how to build them)" .Values.image.registry | trimSuffix "/" -}}
{{- end -}}

{{- define "penstock.image" -}}
{{- $own := (index .root.Values .role).image -}}
{{- if $own -}}{{ $own }}{{- else -}}
{{- if contains "@" .root.Values.image.tag }}{{ fail (printf "expected a tag without a digest in image.tag, found %q: each role's image has a digest of its own; give it in <role>.image (deploy/publish writes them)" .root.Values.image.tag) }}{{ end -}}
{{- printf "%s/%s%s:%s" (include "penstock.registry" .root) .root.Values.image.prefix .role (default .root.Chart.AppVersion .root.Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The roles of this release, without the bus. */}}
{{- define "penstock.roles" -}}
{{- if eq (include "penstock.kind" .) "pod" -}}pod{{- else -}}
coordinator rollout reward trainer{{ if (include "penstock.settings" . | fromJson).episodes }} episodes{{ end }}{{ if .Values.executor.enabled }} executor{{ end }}{{ if include "penstock.tracks" . }} tracking{{ end }}
{{- end -}}
{{- end -}}

{{/* "yes" where pods of a role run programs in the executor: the service of the code scorers, and of the tool `python`. */}}
{{- define "penstock.usesExecutor" -}}
{{- $python := (include "penstock.settings" .root | fromJson).python -}}
{{- if and .root.Values.executor.enabled (or (eq .role "reward") (and (eq .role "episodes") $python)) }}yes{{ end -}}
{{- end -}}

{{/* "yes" where pods of a role have a shelf for payloads: dict "root" $ "role" …. `penstock up` keeps it in the run's folder. */}}
{{- define "penstock.hasShelf" -}}
{{- if and (has .role (list "rollout" "reward" "episodes")) (include "penstock.settings" .root | fromJson).shelves }}yes{{ end -}}
{{- end -}}

{{/* MiB of a shelf's volume: bus.shelf_bytes, a tenth for the file system, and 1 GiB that the service leaves free. */}}
{{- define "penstock.shelfMebibytes" -}}
{{- add (divf (include "penstock.settings" . | fromJson).shelfBytes 953250 | ceil | int64) 1024 -}}
{{- end -}}

{{/* "yes" where the run has trackers. */}}
{{- define "penstock.tracks" -}}
{{- if (include "penstock.settings" . | fromJson).tracks -}}
{{- if include "penstock.ownFolders" . -}}
{{- fail "expected storage.runs.existingClaim with [tracking] in run.config and checkpoints.s3.uri, found none: what each tracker has received must outlast its pod; name a claim, or remove [tracking]" -}}
{{- end -}}
yes
{{- end -}}
{{- end -}}

{{/* The settings of run.config that shape pods, as JSON. The services check the rest. */}}
{{- define "penstock.settings" -}}
{{- $toml := fromToml .Values.run.config -}}
{{- with $toml.Error }}{{ fail (printf "expected TOML in run.config, but %s: correct the file" .) }}{{ end -}}
{{- range $name := list "algorithm" "bus" "data" "episodes" "placement" "reward" "rollout" "tracking" "trainer" -}}
{{- if not (kindIs "map" (dig $name dict $toml)) }}{{ fail (printf "expected a table %s in run.config, found %v: change it" $name (get $toml $name)) }}{{ end -}}
{{- end -}}
{{- $code := false -}}
{{- range dig "reward" "scorers" list $toml }}{{ $code = or $code (eq (toString .kind) "code") }}{{ end -}}
{{- $trainer := dig "trainer" "gpus" list $toml -}}
{{- $rollout := dig "rollout" "gpus" list $toml -}}
{{- $common := false -}}
{{- range $trainer }}{{ $common = or $common (has . $rollout) }}{{ end -}}
{{- dict
      "mode" (dig "placement" "mode" "separate" $toml)
      "ranks" (dig "trainer" "ranks" 1 $toml | int)
      "span" (dig "rollout" "vllm" "tensor_parallel_size" 1 $toml | int)
      "rollouts" (dig "rollout" "replicas" 1 $toml | int)
      "episodes" (ternary (dig "episodes" "replicas" 1 $toml | int) 0 (not (empty (dig "episodes" dict $toml))))
      "rewards" (dig "reward" "replicas" 1 $toml | int)
      "trainerGpus" $trainer
      "rolloutGpus" $rollout
      "rewardGpus" (dig "reward" "gpus" list $toml)
      "commonGpus" $common
      "rewardDevice" (dig "reward" "models" "device" "auto" $toml)
      "samples" (not (or (dig "data" "rejected_field" "" $toml) (eq (dig "algorithm" "loss" "" $toml) "cross_entropy")))
      "code" $code
      "executor" (dig "reward" "executor" "address" "" $toml)
      "python" (not (empty (dig "episodes" "executor" "" $toml)))
      "shelfBytes" (dig "bus" "shelf_bytes" 8589934592 $toml | int64)
      "shelves" (or (gt (dig "bus" "shelve_above_bytes" 0 $toml | int64) (int64 0)) (dig "trainer" "router_replay" false $toml))
      "tracks" (not (empty (dig "tracking" "sinks" list $toml))) | mustToJson -}}
{{- end -}}

{{/* Refuses a number of GPUs of the one pod that is not that of run.config: shared ones count once. */}}
{{- define "penstock.checkPodGpus" -}}
{{- $count := int .Values.pod.gpu.count -}}
{{- $run := include "penstock.settings" . | fromJson -}}
{{- $turns := ne $run.mode "separate" -}}
{{- $trainer := ternary (untilStep 0 (int $run.ranks) 1) $run.trainerGpus (and $turns (empty $run.trainerGpus)) -}}
{{- $needed := 0 -}}
{{- range concat $trainer $run.rolloutGpus $run.rewardGpus }}{{ $needed = max $needed (add1 (int .)) }}{{ end -}}
{{- $known := or $turns $run.commonGpus -}}
{{- if and $count (gt (int $needed) $count) -}}
{{- fail (printf "expected pod.gpu.count of at least %d, for the GPUs of trainer, rollout and reward in run.config, found %d: change pod.gpu.count or these numbers" (int $needed) $count) -}}
{{- end -}}
{{- if and $count $known (lt (int $needed) $count) (not (hasPrefix "cuda:" $run.rewardDevice)) -}}
{{- fail (printf "expected pod.gpu.count = %d, for the GPUs that run.config uses, each once where trainer and replicas share it, found %d: change pod.gpu.count" (int $needed) $count) -}}
{{- end -}}
{{- end -}}

{{/* The processes of the one pod that serve metrics, as JSON: name, service, port as `penstock up` numbers them, portName. */}}
{{- define "penstock.processes" -}}
{{- $run := include "penstock.settings" . | fromJson -}}
{{- $samples := $run.samples -}}
{{- $all := list (dict "service" "coordinator" "name" "coordinator-0" "starts" true) (dict "service" "trainer" "name" "trainer-0" "starts" true) -}}
{{- if and $samples (or $run.code $run.python) -}}
{{- $all = append $all (dict "service" "executor" "name" "executor" "starts" (empty $run.executor)) -}}
{{- end -}}
{{- range until (int $run.rollouts) }}{{ $all = append $all (dict "service" "rollout" "name" (printf "rollout-%d" .) "starts" $samples) }}{{ end -}}
{{- range until (int $run.rewards) }}{{ $all = append $all (dict "service" "reward" "name" (printf "reward-%d" .) "starts" $samples) }}{{ end -}}
{{- range until (int $run.episodes) }}{{ $all = append $all (dict "service" "episodes" "name" (printf "episodes-%d" .) "starts" $samples) }}{{ end -}}
{{- if $run.tracks }}{{ $all = append $all (dict "service" "tracking" "name" "tracking-0" "starts" true) }}{{ end -}}
{{- $started := list -}}
{{- range $index, $one := $all -}}
{{- $known := dict "service" $one.service "name" $one.name "port" (add 9400 $index) "portName" (ternary $one.name "metrics" (gt $index 0)) -}}
{{- if $one.starts }}{{ $started = append $started $known }}{{ end -}}
{{- end -}}
{{- $started | toJson -}}
{{- end -}}

{{/* The name of the workload of the run, which cannot be changed: dict "root" $ "apiVersion" … "kind" "JobSet" "spec" its text, without
its name. One that has not ended keeps its name while its spec stays, whatever the TOML says; pods read that when they start. */}}
{{- define "penstock.shaped" -}}
{{- $root := .root -}}{{- $shape := .spec | sha256sum | trunc 12 -}}
{{- $name := printf "%s-%s" .base (printf "%s %s" .spec $root.Values.run.config | sha256sum | trunc 6) -}}
{{- range (lookup .apiVersion .kind $root.Release.Namespace "").items -}}
{{- $ended := false -}}
{{- range dig "status" "conditions" list . }}{{ $ended = or $ended (and (has .type (list "Complete" "Completed" "Failed")) (eq .status "True")) }}{{ end -}}
{{- if and (not $ended) (eq (dig "metadata" "labels" "app.kubernetes.io/instance" "" .) $root.Release.Name) (eq (dig "metadata" "annotations" "penstock/shape" "" .) $shape) }}{{ $name = .metadata.name }}{{ end -}}
{{- end -}}
{{- dict "name" $name "shape" $shape | toJson -}}
{{- end -}}

{{- define "penstock.runId" -}}
{{- default .Release.Name .Values.run.id -}}
{{- end -}}

{{- define "penstock.busSecret" -}}
{{- coalesce .Values.bus.existingSecret .Values.valkey.existingSecret (include "penstock.name" (dict "root" . "role" "bus")) -}}
{{- end -}}

{{/* Bytes of a quantity of memory such as 8Gi. */}}
{{- define "penstock.bytes" -}}
{{- $suffix := regexFind "[A-Za-z]*$" . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- if not (hasKey $units $suffix) -}}
{{- fail (printf "expected a quantity of memory such as 8Gi for valkey.resources.limits.memory, found %q" .) -}}
{{- end -}}
{{- mulf (trimSuffix $suffix . | float64) (get $units $suffix | float64) | int64 -}}
{{- end -}}

{{- define "penstock.apiSecret" -}}
{{- default (include "penstock.name" (dict "root" . "role" "api")) .Values.api.existingSecret -}}
{{- end -}}

{{/* A secret's value that was made at the first install, or a new one: dict "root" $ "name" … "key" …. `helm template` cannot
look it up and makes a new one each time: there, use secrets of your own. */}}
{{- define "penstock.kept" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if $found }}{{ index $found.data .key | b64dec }}{{ else }}{{ randAlphaNum 40 }}{{ end -}}
{{- end -}}

{{- define "penstock.runsClaim" -}}
{{- default (include "penstock.name" (dict "root" . "role" "runs")) .Values.storage.runs.existingClaim -}}
{{- end -}}

{{/* A value of a role, else of `defaults`: dict "root" $ "role" … "key" …; answers YAML, empty where there is none. */}}
{{- define "penstock.value" -}}
{{- $own := index (index .root.Values .role) .key -}}
{{- with (default (index .root.Values.defaults .key) $own) -}}{{ toYaml . }}{{- end -}}
{{- end -}}

{{/* jobset, workloads or pod: run.kind, where auto is a JobSet if the cluster and the values allow one. */}}
{{- define "penstock.kind" -}}
{{- $kind := .Values.run.kind -}}
{{- $refusal := "" -}}
{{- $nodes := int .Values.rollout.nodes -}}
{{- $scaled := .Values.rollout.autoscaling.enabled -}}
{{- range .Values.rollout.pools }}{{ $nodes = max $nodes (int (default 1 .nodes)) }}{{ $scaled = or $scaled (dig "autoscaling" "enabled" false .) }}{{ end -}}
{{- if not (.Capabilities.APIVersions.Has "jobset.x-k8s.io/v1alpha2") -}}
{{- $refusal = "JobSet, whose jobset.x-k8s.io/v1alpha2 this cluster does not know: install it" -}}
{{- else if gt $nodes 1 -}}
{{- $refusal = printf "rollout.nodes = 1, but it is %d, and a LeaderWorkerSet cannot be part of a JobSet: change it" $nodes -}}
{{- else if and $scaled (not (.Capabilities.APIVersions.Has "keda.sh/v1alpha1")) -}}
{{- $refusal = "KEDA for rollout.autoscaling.enabled, because a HorizontalPodAutoscaler cannot subtract the JobSet's replicas: install it" -}}
{{- else if not (or .Values.rollout.pools .Values.rollout.autoscaling.enabled .Values.rollout.replicas) -}}
{{- $refusal = "rollout.replicas of at least 1: change it" -}}
{{- end -}}
{{- if and $refusal (eq $kind "jobset") }}{{ fail (printf "run.kind = jobset needs %s, or set run.kind to workloads" $refusal) }}{{ end -}}
{{- if eq $kind "auto" }}{{ $kind = ternary "workloads" "jobset" (ne $refusal "") }}{{ end -}}
{{- if and .Values.kueue.queue (eq $kind "workloads") -}}
{{- fail (printf "kueue.queue needs run.kind = jobset, or Kueue admits a trainer that no rollout replica feeds; a JobSet needs %s, or remove kueue.queue" (default "run.kind to be auto or jobset: change it" $refusal)) -}}
{{- end -}}
{{- if and (eq $kind "pod") (ne .Values.run.onFinish "release") -}}
{{- fail "run.onFinish = keep needs run.kind = jobset or workloads, because `penstock up` ends with its run: change one of them" -}}
{{- end -}}
{{- $kind -}}
{{- end -}}

{{/* The rollout replicas that the run's JobSet contains; 0: it has none. KEDA adds and removes others. */}}
{{- define "penstock.gang" -}}
{{- if ne (include "penstock.kind" .) "jobset" -}}0
{{- else if .Values.rollout.autoscaling.enabled -}}{{ max (ternary 0 1 (hasKey .Values.rollout "name")) (int .Values.rollout.autoscaling.minReplicas) }}
{{- else -}}{{ int .Values.rollout.replicas }}
{{- end -}}
{{- end -}}

{{/* "yes" where pods of a role belong to a Deployment or similar, instead of (or besides) the JobSet: dict "root" $ "role" …. */}}
{{- define "penstock.separate" -}}
{{- $own := index .root.Values .role -}}
{{- $kind := include "penstock.kind" .root -}}
{{- if eq $kind "workloads" -}}yes
{{- else if and (eq $kind "jobset") (ne .role "trainer") (dig "autoscaling" "enabled" (has .role (list "episodes" "executor")) $own) -}}
{{- if or (ne .role "rollout") (gt (int $own.autoscaling.maxReplicas) (int (include "penstock.gang" .root))) -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* "yes" where other coordinators take over when the run is over. */}}
{{- define "penstock.resting" -}}
{{- if and (eq .Values.run.onFinish "release") (include "penstock.oneNode" .) }}yes{{ end -}}
{{- end -}}

{{/* What the coordinator scales to zero when the run is over, as JSON: group/version/resource/name; with =number, to that. */}}
{{- define "penstock.released" -}}
{{- $all := list -}}
{{- if eq .Values.run.onFinish "release" -}}
{{- range $role := without (splitList " " (include "penstock.roles" .)) "coordinator" "pod" "tracking" -}}
{{- range $pool := ternary $.Values.rollout.pools list (eq $role "rollout") | default (list dict) -}}
{{- $root := dict "Values" (merge (dict "rollout" (mergeOverwrite (deepCopy $.Values.rollout) $pool)) (omit $.Values "rollout")) "Release" $.Release "Chart" $.Chart "Capabilities" $.Capabilities -}}
{{- $one := dict "root" $root "role" $role -}}
{{- if include "penstock.separate" $one -}}
{{- $kind := ternary "apps/v1/statefulsets" "apps/v1/deployments" (eq $role "trainer") -}}
{{- if and (eq $role "rollout") (include "penstock.leaderWorkerSet" $root) }}{{ $kind = "leaderworkerset.x-k8s.io/v1/leaderworkersets" }}{{ end -}}
{{- if and (has $role (list "rollout" "reward")) (eq (include "penstock.scaler" $one) "keda") -}}
{{- $all = append $all (printf "keda.sh/v1alpha1/scaledobjects/%s" (include "penstock.name" $one)) -}}
{{- end -}}
{{- $all = append $all (printf "%s/%s" $kind (include "penstock.name" $one)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (include "penstock.resting" .) (ne (include "penstock.kind" .) "pod") -}}
{{- $own := printf "apps/v1/deployments/%s" (include "penstock.name" (dict "root" . "role" "coordinator")) -}}
{{- $all = append $all (printf "%s-after=%d" $own (int .Values.coordinator.replicas)) -}}
{{- $all = append $all $own -}}
{{- end -}}
{{- end -}}
{{- $all | toJson -}}
{{- end -}}

{{- define "penstock.queueLabels" -}}
{{- with .Values.kueue.queue }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- with .Values.kueue.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . }}
{{- end }}
{{- end -}}

{{/* "yes" where a replica of rollout is several pods, whose engine spans them. */}}
{{- define "penstock.leaderWorkerSet" -}}
{{- $nodes := int .Values.rollout.nodes -}}
{{- if gt $nodes 1 -}}
{{- if not (.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") -}}
{{- fail (printf "expected the CRD of LeaderWorkerSet for rollout.nodes = %d, found no leaderworkerset.x-k8s.io/v1 in this cluster: install LeaderWorkerSet, or set rollout.nodes to 1" $nodes) -}}
{{- end -}}
yes
{{- end -}}
{{- end -}}

{{- define "penstock.rolloutSecret" -}}
{{- default (include "penstock.name" (dict "root" . "role" "rollout")) .Values.rollout.existingSecret -}}
{{- end -}}

{{- define "penstock.executorSecret" -}}
{{- default (include "penstock.name" (dict "root" . "role" "executor")) .Values.executor.existingSecret -}}
{{- end -}}

{{/* Who sets the number of replicas: "keda", "hpa", or "" where a value does: dict "root" $ "role" "rollout". */}}
{{- define "penstock.scaler" -}}
{{- $scaling := (index .root.Values .role).autoscaling -}}
{{- $apis := .root.Capabilities.APIVersions -}}
{{- if $scaling.enabled -}}
{{- if $apis.Has "keda.sh/v1alpha1" -}}keda
{{- else if not ($apis.Has "external.metrics.k8s.io/v1beta1") -}}
{{- fail (printf "expected KEDA or an external metrics API for %s.autoscaling.enabled, found neither keda.sh/v1alpha1 nor external.metrics.k8s.io/v1beta1 in this cluster: install KEDA, or prometheus-adapter with the rule in docs/kubernetes.md, or disable it" .role) -}}
{{- else if lt (int $scaling.minReplicas) 1 -}}
{{- fail (printf "expected %s.autoscaling.minReplicas of at least 1 in a cluster without KEDA, found %d: a HorizontalPodAutoscaler does not scale to zero; set it to 1, or install KEDA" .role (int $scaling.minReplicas)) -}}
{{- else -}}hpa
{{- end -}}
{{- end -}}
{{- end -}}
