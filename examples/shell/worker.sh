#!/usr/bin/env bash
# A Faena worker over plain HTTP. Needs bash, curl and jq.
#
#     bash examples/shell/worker.sh
set -u

url="${FAENA_URL:-http://127.0.0.1:3000}"
url="${url%/}/api/v1/workers"

# ------------------------------------------------------------- your handlers

# greet JOB: prints the result as JSON. A status other than 0 fails the attempt with the text on stderr; 2 fails the job without a retry.
greet() {
  local job=$1 name greeting
  name=$(jq -r '.payload.name // ""' <<<"$job")
  if [[ -z $name ]]; then
    echo "the name is empty" >&2
    return 2
  fi
  send "$job" progress '{"progress": {"phase": "greeting", "percentage": 50}}'
  # A step that an earlier run has completed does not run again; its stored result is used.
  if ! greeting=$(completed_step "$job" greeting); then
    greeting=$(jq -n --arg name "$name" '"Hello, " + $name')
    report "$job" step "$(jq -n --argjson result "$greeting" '{name: "greeting", $result}')" || return 3
  fi
  sleep "$(jq -r '.payload.seconds // 0' <<<"$job")"
  jq -n --argjson greeting "$greeting" '{$greeting}'
}

capabilities='["greet"]'

handle() {
  case $(jq -r .type <<<"$1") in
    greet) greet "$1" ;;
    *) echo "no handler for this type" >&2; return 1 ;;
  esac
}

# --------------------------------------------------- the same for all handlers

# post PATH BODY: prints the answer. Status 0: accepted, 22: rejected (the answer has the reason), other: no answer.
post() {
  local answer status
  answer=$(curl -sS -m 30 -w '\n%{http_code}' -H 'content-type: application/json' \
    ${FAENA_TOKEN:+-H "authorization: Bearer $FAENA_TOKEN"} ${session_token:+-H "x-session-token: $session_token"} \
    -d "$2" "$url$1") || return
  status=${answer##*$'\n'}
  printf '%s\n' "${answer%$'\n'*}"
  [[ $status == 2?? ]] && return 0
  [[ $status == 5?? ]] && return 1
  return 22
}

# send JOB KIND BODY: sends a report once, with the run of the job.
send() {
  post "/$worker/jobs/$(jq -r .id <<<"$1")/$2" "$(jq -c --argjson run "$(jq .run <<<"$1")" '. + {$run}' <<<"$3")" >/dev/null
}

# report JOB KIND BODY: sends a report until it is answered. The server counts a repeated report once.
report() {
  local code
  while :; do
    send "$1" "$2" "$3"
    code=$?
    ((code == 0)) && return 0
    ((code == 22)) && { echo "$2 rejected: the job was assigned to another worker" >&2; return 1; }
    sleep 1
  done
}

# completed_step JOB NAME: prints the stored result, or fails if there is none.
completed_step() {
  jq -ce --arg name "$2" '.steps[]? | select(.name == $name) | .result' <<<"$1"
}

run_job() {
  local job=$1 result code errors
  errors=$(mktemp)
  result=$(handle "$job" 2>"$errors")
  code=$?
  case $code in
    0) report "$job" complete "$(jq -n --argjson result "$result" '{$result}')" ;;
    2) report "$job" fail "$(jq -n --rawfile error "$errors" '{error: ($error | rtrimstr("\n")), retryable: false}')" ;;
    3) cat "$errors" >&2 ;; # assigned to another worker
    *) report "$job" fail "$(jq -n --rawfile error "$errors" '{error: ($error | rtrimstr("\n")), retryable: true}')" ;;
  esac
  rm -f "$errors"
}

register() {
  local answer
  # A worker pool sets the id and the token of its processes; otherwise the server chooses them, and the worker keeps them.
  local body
  body=$(jq -n --arg id "${worker:-${FAENA_WORKER_ID:-}}" --arg token "$session_token" --argjson capabilities "$capabilities" \
    '{name: "shell", $capabilities, concurrency: 1} + if $id == "" then {} else {workerId: $id} end
      + if $token == "" then {} else {sessionToken: $token} end')
  # Tries again while the server is not reachable or is stopping (UNAVAILABLE).
  until answer=$(post /register "$body"); do
    echo "not registered: $answer" >&2
    [[ -n $stopping ]] && exit 0
    sleep 1
  done
  worker=$(jq -r .workerId <<<"$answer")
  session_token=$(jq -r '.sessionToken // ""' <<<"$answer")
  echo "registered as $worker"
  [[ -n $heartbeat ]] && kill "$heartbeat" 2>/dev/null
  # Heartbeats run in the background, because a job may take a long time.
  while sleep "$(jq '.heartbeatIntervalMs / 1000' <<<"$answer")"; do post "/$worker/heartbeat" '{}'; done >/dev/null 2>&1 &
  heartbeat=$!
}

leave() {
  [[ -n $heartbeat ]] && kill "$heartbeat" 2>/dev/null
  if [[ -n $worker ]]; then
    curl -sS -m 5 -X DELETE ${FAENA_TOKEN:+-H "authorization: Bearer $FAENA_TOKEN"} \
      ${session_token:+-H "x-session-token: $session_token"} "$url/$worker" >/dev/null && echo "left"
  fi
  rm -f "$claimed"
}

worker='' session_token="${FAENA_SESSION_TOKEN:-}" heartbeat='' stopping='' waiting=''
claimed=$(mktemp)
trap leave EXIT
# A running job finishes first; a waiting claim is aborted. A job that was on its way is released when the worker leaves.
trap 'stopping=1; [[ -n $waiting ]] && kill "$waiting" 2>/dev/null' TERM INT

register
while [[ -z $stopping ]]; do
  # The claim runs in the background, because bash handles a signal immediately only while it waits.
  post "/$worker/claim" '{"max": 1, "waitMs": 20000}' >"$claimed" &
  waiting=$!
  wait "$waiting"
  code=$?
  waiting=''
  [[ -n $stopping ]] && break
  if ((code == 0)); then
    while read -r job; do run_job "$job"; done < <(jq -c '.jobs[]' "$claimed")
    [[ $(jq .drain "$claimed") == true ]] && break
  elif ((code == 22)) && [[ $(jq -r .error.code "$claimed") == NOT_FOUND ]]; then
    session_token='' # the server has declared this worker lost
    register
  else
    sleep 1 # the server is not reachable or stops; the next call continues where this one failed
  fi
done
exit 0
