#!/usr/bin/env bash
# A Faena worker over plain HTTP. Needs bash, curl and jq.
#
#     bash examples/shell/worker.sh
set -u

url="${FAENA_URL:-http://127.0.0.1:3000}"
url="${url%/}/api/v1/workers"

# ---------------------------------------------------------------- your part

# greet JOB: prints the result as JSON. Anything but 0 is a failure with what was said on stderr: 2 is not tried again.
greet() {
  local job=$1 name greeting
  name=$(jq -r '.payload.name // ""' <<<"$job")
  if [[ -z $name ]]; then
    echo "the name is empty" >&2
    return 2
  fi
  tell "$job" progress '{"progress": {"phase": "greeting", "percentage": 50}}'
  # A step that an earlier run has finished is not done again; its stored result is used.
  if ! greeting=$(finished_step "$job" greeting); then
    greeting=$(jq -n --arg name "$name" '"Hello, " + $name')
    report "$job" step "$(jq -n --argjson result "$greeting" '{name: "greeting", $result}')" || return 3
  fi
  jq -n --argjson greeting "$greeting" '{$greeting}'
}

capabilities='["greet"]'

handle() {
  case $(jq -r .type <<<"$1") in
    greet) greet "$1" ;;
    *) echo "no handler for this type" >&2; return 1 ;;
  esac
}

# ------------------------------------------------- the rest is for all handlers

# post PATH BODY: prints the answer. 0: done, 22: refused (the answer says why), anything else: no answer.
post() {
  local answer status
  answer=$(curl -sS -m 30 -w '\n%{http_code}' -H 'content-type: application/json' \
    ${FAENA_TOKEN:+-H "authorization: Bearer $FAENA_TOKEN"} -d "$2" "$url$1") || return
  status=${answer##*$'\n'}
  printf '%s\n' "${answer%$'\n'*}"
  [[ $status == 2?? ]] && return 0
  [[ $status == 5?? ]] && return 1
  return 22
}

# tell JOB WHAT BODY: sends it once, under the run of the job.
tell() {
  post "/$worker/jobs/$(jq -r .id <<<"$1")/$2" "$(jq -c --argjson run "$(jq .run <<<"$1")" '. + {$run}' <<<"$3")" >/dev/null
}

# report JOB WHAT BODY: sends until it is answered. It may arrive twice, and counts once.
report() {
  local code
  while :; do
    tell "$1" "$2" "$3"
    code=$?
    ((code == 0)) && return 0
    ((code == 22)) && { echo "$2 was refused: another worker has the job" >&2; return 1; }
    sleep 1
  done
}

# finished_step JOB NAME: prints the stored result, or fails when there is none.
finished_step() {
  jq -ce --arg name "$2" '.steps[]? | select(.name == $name) | .result' <<<"$1"
}

do_job() {
  local job=$1 result code said
  said=$(mktemp)
  result=$(handle "$job" 2>"$said")
  code=$?
  case $code in
    0) report "$job" complete "$(jq -n --argjson result "$result" '{$result}')" ;;
    2) report "$job" fail "$(jq -n --rawfile error "$said" '{error: ($error | rtrimstr("\n")), retryable: false}')" ;;
    3) cat "$said" >&2 ;; # not ours any more
    *) report "$job" fail "$(jq -n --rawfile error "$said" '{error: ($error | rtrimstr("\n")), retryable: true}')" ;;
  esac
  rm -f "$said"
}

register() {
  local answer
  # A pool of Faena's gives its processes a name; otherwise the server makes one.
  local name=${FAENA_WORKER_ID:+"\"workerId\": \"$FAENA_WORKER_ID\","}
  until answer=$(post /register "{$name \"name\": \"shell\", \"capabilities\": $capabilities, \"concurrency\": 1}"); do
    echo "no registration: $answer" >&2
    [[ -n $stopping ]] && exit 0
    sleep 2
  done
  worker=$(jq -r .workerId <<<"$answer")
  echo "registered as $worker"
  [[ -n $beating ]] && kill "$beating" 2>/dev/null
  # In the background, because a job may take long.
  while sleep "$(jq '.heartbeatIntervalMs / 1000' <<<"$answer")"; do post "/$worker/heartbeat" '{}'; done >/dev/null 2>&1 &
  beating=$!
}

leave() {
  [[ -n $beating ]] && kill "$beating" 2>/dev/null
  if [[ -n $worker ]]; then
    curl -sS -m 5 -X DELETE ${FAENA_TOKEN:+-H "authorization: Bearer $FAENA_TOKEN"} "$url/$worker" >/dev/null && echo "left"
  fi
  rm -f "$claimed"
}

worker='' beating='' stopping='' waiting=''
claimed=$(mktemp)
trap leave EXIT
# A job that runs is finished first; a claim that only waits is given up. What was on its way goes back when the worker leaves.
trap 'stopping=1; [[ -n $waiting ]] && kill "$waiting" 2>/dev/null' TERM INT

register
while [[ -z $stopping ]]; do
  # In the background, because bash hears a signal at once only while it waits.
  post "/$worker/claim" '{"max": 1, "waitMs": 20000}' >"$claimed" &
  waiting=$!
  wait "$waiting"
  code=$?
  waiting=''
  [[ -n $stopping ]] && break
  if ((code == 0)); then
    while read -r job; do do_job "$job"; done < <(jq -c '.jobs[]' "$claimed")
    [[ $(jq .drain "$claimed") == true ]] && break
  elif ((code == 22)) && [[ $(jq -r .error.code "$claimed") == NOT_FOUND ]]; then
    register # it was taken for lost
  else
    sleep 2
  fi
done
exit 0
