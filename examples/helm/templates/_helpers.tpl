{{- /* Labels of every resource. `cache.selector` is the part that never changes. */ -}}
{{- define "cache.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "cache.labels" -}}
{{ include "cache.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "cache.redis" -}}{{- if ne .Values.redis.kind "none" }}yes{{ end -}}{{- end -}}
{{- define "cache.tls" -}}
{{- if and (include "cache.redis" .) .Values.redis.tls.enabled }}yes{{ end -}}
{{- end -}}

{{- /* The Redis URL. Secrets stay references, which the kubelet fills in. */ -}}
{{- define "cache.url" -}}
{{- $redis := .Values.redis -}}
{{- $kinds := dict "bundled" "" "single" "" "sentinel" "+sentinel" "cluster" "+cluster" -}}
{{- $scheme := printf "%s%s" (ternary "rediss" "redis" $redis.tls.enabled) (get $kinds $redis.kind) -}}
{{- $hosts := $redis.hosts -}}
{{- if eq $redis.kind "bundled" -}}{{- $hosts = list (printf "%s-valkey:6379" .Release.Name) -}}{{- end -}}
{{- $path := ternary (printf "/%s" $redis.master) "" (eq $redis.kind "sentinel") -}}
{{- $options := list -}}
{{- if $redis.tls.enabled -}}{{- $options = append $options "ssl_ca_certs=/tls/ca.crt" -}}{{- end -}}
{{- if and $redis.sentinelPassword (eq $redis.kind "sentinel") -}}
{{- $options = append $options "sentinel_password=$(SENTINEL_PASSWORD)" -}}
{{- end -}}
{{- $query := ternary (printf "?%s" (join "&" $options)) "" (gt (len $options) 0) -}}
{{- printf "%s://%s:$(KV_CACHE_PASSWORD)@%s%s%s" $scheme $redis.username (join "," $hosts) $path $query -}}
{{- end -}}

{{- define "cache.env" -}}
{{- if include "cache.redis" . -}}
- name: KV_CACHE_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.secret }}, key: password}
{{- if and .Values.redis.sentinelPassword (eq .Values.redis.kind "sentinel") }}
- name: SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.secret }}, key: sentinel-password}
{{- end }}
- name: KV_CACHE_URL
  value: {{ include "cache.url" . | quote }}
- name: KV_CACHE_HASH_KEY
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.secret }}, key: hash-key}
{{- end -}}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "cache.mounts" -}}
- {name: config, mountPath: /config, readOnly: true}
{{- if include "cache.tls" . }}
- {name: authority, mountPath: /tls, readOnly: true}
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* --kv-transfer-config. Both secrets come from the environment: vLLM logs its command line. */ -}}
{{- define "cache.transfer" -}}
{{- $settings := dict "cpu_gib" .Values.cache.cpuGib "namespace" .Values.cache.namespace -}}
{{- if include "cache.redis" . -}}
{{- $_ := set $settings "redis_url" "env:KV_CACHE_URL" -}}
{{- $_ := set $settings "hash_key" "env:KV_CACHE_HASH_KEY" -}}
{{- if .Values.cache.ttlSeconds -}}{{- $_ := set $settings "redis_ttl_seconds" (int .Values.cache.ttlSeconds) -}}{{- end -}}
{{- end -}}
{{- $settings = merge (dict) .Values.cache.settings $settings -}}
{{- dict "kv_connector" "LMCacheTieredConnector" "kv_role" "kv_both" "kv_connector_extra_config" $settings | toPrettyJson -}}
{{- end -}}

{{- define "events.config" -}}
{{- $topic := printf "kv@$(POD_IP)@%s" .Values.model -}}
{{- dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" .Values.kvEvents.endpoint "topic" $topic | toJson -}}
{{- end -}}
