//! Guarantees of the store, one test each.
//!
//! Every test runs on SQLite and on PostgreSQL, with its own database; afterwards `RawDatabase::assert_consistent` checks all tables.
//!
//! PostgreSQL is the server in FAENA_TEST_POSTGRES; without it `postgres::…` fails. `--skip postgres::` leaves it out.

#![allow(clippy::unwrap_used, reason = "a test that meets an error it does not expect should stop there")]

mod actors;
mod api_keys;
mod approval_webhooks;
mod attempts;
mod audit;
mod bounds;
mod bulk;
mod candidates;
mod changes;
mod claims;
mod doctor;
mod doctor_reports;
mod doctor_tasks;
mod ends;
mod events;
mod dependents;
mod following;
mod graphs;
mod history;
mod external;
mod keys;
mod dead_letters;
mod limits;
mod rates;
mod lists;
mod model;
mod nodes;
mod one_database;
mod schedules;
mod outbox;
mod submits;
mod support;
mod task_limits;
mod task_model;
mod task_operations;
mod task_signals;
mod tasks;
mod times;
mod usage;
mod webhooks;
mod workers;
mod lost_workers;

/// Expands `module: test, test; …` to `sqlite::test` and `postgres::test`.
macro_rules! behaviours {
    ($($module:ident: $($test:ident),+ $(,)?;)+) => {
        mod sqlite {
            $($(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                crate::support::on_sqlite(crate::$module::$test).await;
            })+)+
        }

        mod postgres {
            $($(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                crate::support::on_postgres(crate::$module::$test).await;
            })+)+
        }
    };
}

behaviours! {
    bounds:
        a_lane_without_jobs_is_reclaimed_and_its_totals_are_kept,
        a_full_database_accepts_new_lanes_again_when_others_are_empty,
        a_long_log_keeps_its_first_and_its_newest_entries,
        the_view_of_a_job_has_its_newest_log_entries_and_pages_have_all,
        steps_beyond_their_limit_are_rejected,
        rejected_reports_are_counted_in_one_entry,
        a_job_that_is_released_again_and_again_keeps_its_newest_attempts,
        a_long_chain_is_cancelled_in_slices_that_survive_a_restart,
        many_dependents_of_one_job_are_released_in_slices,
        dependents_of_a_parent_that_is_retried_between_two_slices_wait_for_it,
        the_log_limit_applies_to_each_job_separately;
    tasks:
        a_version_of_a_machine_never_changes,
        a_repeated_event_is_applied_once_and_gets_the_same_answer,
        a_message_creates_its_task_once,
        a_key_creates_its_task_once,
        a_creation_that_fails_leaves_its_key_free,
        a_task_that_exists_fails_only_its_own_creation,
        open_tasks_are_counted_by_machine_and_state,
        a_refused_event_changes_nothing_and_may_be_sent_again,
        the_end_of_a_job_continues_its_task,
        a_failed_or_cancelled_job_continues_its_task_too,
        timers_fire_when_they_are_due_and_not_before,
        a_task_and_its_timers_survive_a_restart,
        events_of_a_task_are_kept_without_a_subscription,
        tasks_are_listed_by_machine_state_and_approval,
        old_tasks_are_deleted_with_everything_they_wrote,
        random_inputs_give_the_same_history_as_the_pure_step;
    task_model:
        random_events_crashes_and_clock_jumps_agree_with_a_model;
    task_operations:
        a_task_is_found_by_its_tags,
        a_fork_starts_where_the_history_says,
        an_event_reaches_every_matching_task_once,
        tasks_that_changed_meanwhile_are_skipped,
        tasks_move_to_another_version_unless_it_lacks_their_state,
        a_migration_continues_where_another_node_stopped,
        tasks_are_counted_by_state,
        the_events_of_one_task_are_listed;
    task_signals:
        every_end_of_a_job_wakes_its_task,
        only_an_earlier_due_time_is_announced,
        a_queued_task_and_a_freed_slot_are_announced;
    task_limits:
        a_task_beyond_the_limit_is_queued_and_starts_when_another_ends,
        events_of_a_queued_task_wait_for_its_start,
        a_queued_task_can_be_cancelled,
        an_operator_changes_the_limit_of_a_machine,
        the_newest_version_of_a_machine_decides_its_limit,
        concurrent_creations_and_starts_never_exceed_the_limit,
        a_task_that_a_message_creates_counts_too,
        queued_tasks_are_listed_counted_and_know_their_position;
    approval_webhooks:
        a_webhook_is_stored_with_the_change_of_an_approval,
        every_receiver_is_notified_of_each_change_of_an_approval,
        the_webhook_about_a_decision_names_those_who_decided,
        a_large_subject_is_named_by_its_hash_only,
        webhooks_of_an_approval_are_deleted_with_their_task;
    doctor_tasks:
        healthy_tasks_in_various_states_have_no_finding,
        a_task_without_its_timers_gets_them_again,
        a_task_with_a_timer_of_another_state_loses_it,
        wrong_columns_of_a_task_are_written_again,
        records_events_and_jobs_of_a_missing_task_are_deleted,
        a_broken_history_is_reported,
        a_contradictory_or_unreadable_task_is_reported,
        a_changed_or_missing_machine_is_reported,
        an_overdue_timer_is_reported;
    history:
        totals_count_every_event_once_and_outlive_the_jobs,
        a_retried_job_fails_twice_and_is_created_once,
        the_history_counts_by_hour_and_by_day,
        minutes_have_totals_and_no_measured_times,
        completed_jobs_are_recorded_by_priority,
        an_idle_recording_writes_nothing,
        measured_times_are_added_up,
        a_restart_neither_loses_nor_repeats_history,
        nodes_that_record_at_the_same_time_count_once,
        the_history_outlives_the_jobs_until_its_own_retention,
        the_history_of_some_queues_contains_no_others,
        jobs_in_flight_are_counted_by_state,
        one_node_has_the_lease_of_the_metrics;
    api_keys:
        a_created_key_is_found_by_its_lookup_part,
        a_rotated_key_keeps_its_id_and_accepts_both_secrets_until_the_overlap_ends,
        a_second_rotation_ends_the_overlap_of_the_first,
        a_revoked_key_stays_revoked_and_cannot_be_rotated,
        an_expired_key_cannot_be_rotated,
        every_change_of_a_key_has_an_audit_entry_without_secrets,
        the_last_use_of_a_key_never_moves_back,
        an_unknown_key_is_reported_as_such,
        keys_survive_a_restart;
    usage:
        reservations_never_exceed_the_budget_of_a_day,
        a_settled_reservation_counts_what_was_used,
        reservations_never_exceed_the_budget_of_a_task;
    submits:
        a_submitted_job_can_be_read_back,
        a_failing_submit_does_not_undo_others_of_its_group,
        a_batch_returns_its_ids_in_order,
        a_payload_is_kept_byte_for_byte,
        every_option_is_stored_for_a_single_job_and_in_a_batch,
        a_job_with_a_future_time_waits,
        a_job_whose_time_has_passed_is_ready,
        an_unknown_job_is_not_found,
        strings_that_look_like_sql_or_keys_are_just_strings;
    events:
        a_job_has_its_events_in_order,
        a_job_has_an_event_for_each_failed_attempt,
        events_name_their_actor,
        only_events_with_a_subscription_are_recorded,
        an_expired_subscription_is_deleted_and_events_are_no_longer_recorded,
        subscriptions_outlive_the_server_that_made_them,
        a_rejected_action_records_no_event,
        a_queued_event_waits_once_for_every_subscribed_sink,
        the_last_event_of_a_job_always_has_its_state,
        a_changed_job_from_before_the_subscription_has_no_created_event,
        the_event_of_an_assignment_has_the_retry_count,
        deleted_jobs_leave_no_event_sequence,
        events_without_a_subscription_are_still_pruned;
    outbox:
        events_wait_for_their_sink_in_order_until_they_are_confirmed,
        a_sink_takes_events_up_to_the_limit,
        two_nodes_share_the_partitions_and_never_both_own_one,
        concurrent_nodes_never_both_lease_a_partition,
        a_dead_node_is_replaced_after_its_lease_and_a_stopped_one_immediately,
        a_lease_is_renewed_by_a_request,
        a_sink_without_a_subscription_has_no_events,
        a_rejected_event_delays_only_its_subject,
        five_rejections_make_a_dead_letter_with_all_details,
        a_sink_that_skips_continues_behind_a_dead_letter_and_one_that_parks_waits_for_it,
        a_resolved_dead_letter_names_the_actor_and_the_reason,
        dead_letters_are_replayed_in_order_under_their_own_ids_at_a_rate,
        a_replayed_dead_letter_precedes_the_events_parked_behind_it,
        dead_letters_are_found_by_filter_and_in_pages,
        sent_events_of_a_time_range_are_republished_but_not_waiting_ones,
        a_sink_that_is_down_shows_since_when_and_why_and_uses_no_attempt,
        late_results_of_a_lost_partition_count_if_they_are_confirmations,
        every_event_is_sent_or_waiting_or_dead,
        waiting_and_dead_events_are_not_pruned,
        a_message_creates_its_jobs_once_per_consumer,
        a_message_that_arrives_twice_concurrently_creates_its_jobs_once,
        a_message_whose_jobs_are_rejected_is_not_processed,
        old_processed_messages_are_deleted;
    following:
        a_reader_sees_every_event_once_and_each_subject_in_order_while_many_write,
        events_without_a_subscription_are_outside_the_kept_range,
        pruned_events_are_outside_the_kept_range,
        a_renewed_subscription_keeps_its_range;
    keys:
        a_repeated_idempotency_key_returns_the_first_job,
        an_idempotency_key_with_another_body_is_rejected,
        twenty_concurrent_submits_with_one_idempotency_key_create_one_job,
        a_batch_repeated_under_its_idempotency_keys_creates_no_jobs,
        one_idempotency_key_twice_in_a_batch_creates_one_job,
        one_idempotency_key_for_two_bodies_in_a_batch_is_rejected,
        a_child_of_a_repeated_job_depends_on_the_first_one,
        a_unique_key_is_taken_until_its_job_has_finished,
        a_unique_key_twice_in_a_batch_is_rejected,
        twenty_concurrent_submits_with_one_unique_key_leave_one_job,
        a_repeated_request_with_both_keys_returns_the_first_job,
        a_unique_key_is_free_again_however_its_job_finishes,
        a_manual_retry_takes_the_unique_key_again,
        a_manual_retry_is_rejected_while_another_job_has_the_unique_key,
        a_rejected_batch_leaves_no_key,
        a_job_that_is_cancelled_at_submit_does_not_take_its_unique_key;
    dependents:
        an_unknown_parent_is_rejected_and_nothing_is_stored,
        a_child_waits_for_all_its_parents,
        a_child_of_a_finished_and_an_open_parent_waits_for_the_open_one_only,
        a_child_of_finished_parents_is_ready_immediately,
        a_child_of_a_failed_or_cancelled_parent_is_cancelled_immediately,
        a_failed_parent_cancels_its_children_down_the_chain,
        a_child_set_to_run_anyway_runs_although_a_parent_failed,
        a_retried_child_waits_for_a_parent_that_was_retried_before_it,
        a_child_with_a_scheduled_time_waits_for_it_after_its_parents,
        two_parents_that_end_concurrently_release_their_child_once,
        a_deleted_parent_cancels_its_child,
        a_cancelled_parent_cancels_its_child,
        an_expired_parent_cancels_its_child,
        a_permanently_lost_parent_cancels_its_child,
        a_child_whose_release_was_missed_is_released_by_the_next_check,
        checking_parents_again_does_not_release_a_delayed_sibling,
        a_graph_in_one_batch_runs_in_order,
        cancelling_a_child_does_not_change_its_parents;
    graphs:
        a_job_shows_what_it_depends_on_and_what_depends_on_it,
        links_to_finished_jobs_stay_until_a_job_is_deleted,
        near_jobs_come_first_and_the_rest_is_counted,
        a_job_with_ten_thousand_children_shows_some_of_them,
        a_long_chain_is_followed_in_both_directions,
        jobs_of_other_queues_are_in_no_graph,
        an_unknown_job_has_no_graph;
    times:
        delayed_jobs_become_ready_in_the_order_of_their_times,
        a_promotion_is_bounded_and_reports_that_more_is_due,
        the_next_due_time_is_returned,
        a_ready_job_expires,
        a_waiting_job_expires,
        a_running_job_does_not_expire_while_it_runs,
        a_job_that_is_requeued_after_its_expiry_expires,
        a_retried_expired_job_runs,
        a_finished_job_does_not_expire,
        jobs_that_no_worker_can_run_fail,
        old_finished_jobs_are_pruned_by_state_and_leave_nothing,
        pruning_is_bounded,
        pruning_deletes_old_cancel_requests_but_not_those_of_running_jobs,
        a_poll_returns_pending_work,
        ready_waiting_and_cancelled_jobs_emit_signals,
        calls_that_find_nothing_emit_no_signal;
    candidates:
        a_claim_with_candidates_takes_only_those_that_are_ready_there,
        a_claim_with_candidates_takes_no_more_than_its_limit,
        candidates_wait_for_limits_and_pauses,
        jobs_with_keys_are_chosen_by_the_store_beside_candidates,
        a_worker_that_has_ended_gets_no_candidates,
        the_queue_feed_announces_what_becomes_ready_or_waits,
        the_queue_feed_announces_what_leaves_without_a_claim,
        the_queue_of_the_database_can_be_read_in_pages;
    claims:
        a_log_keeps_its_order_if_clocks_go_back,
        a_claim_orders_by_score_so_waiting_outweighs_priority,
        a_strict_queue_never_prefers_a_lower_priority,
        equal_scores_are_ordered_by_id,
        queues_are_served_round_robin,
        a_claim_returns_only_jobs_of_the_requested_lanes,
        a_lane_requested_twice_gives_its_jobs_once,
        a_claimed_job_has_everything_a_worker_needs,
        a_job_is_claimed_by_one_worker_only,
        a_job_that_becomes_ready_before_the_last_claimed_one_is_found,
        run_numbers_only_grow;
    ends:
        a_completed_job_shows_its_result,
        the_results_of_many_ends_in_one_call_are_in_order,
        a_started_job_is_processing,
        progress_messages_and_steps_are_kept_and_shown,
        a_step_is_kept_once_and_survives_the_run,
        completed_steps_update_the_progress,
        the_last_progress_stays_in_every_later_state,
        a_custom_event_of_a_worker_is_an_entry_of_the_log,
        reported_progress_wins_over_counted_steps,
        the_steps_of_several_jobs_are_read_together,
        a_late_report_is_recorded_in_the_log,
        updates_of_a_stale_run_change_nothing,
        the_same_end_reported_again_counts_once,
        the_same_end_twice_in_one_call_counts_once,
        another_end_of_an_ended_run_changes_nothing,
        an_end_after_its_claim_was_closed_is_stale_unless_it_is_a_repetition,
        a_report_of_a_deleted_job_changes_nothing,
        a_job_with_a_failed_attempt_waits_and_keeps_its_retry_count,
        a_job_without_attempts_left_is_dead_lettered,
        a_released_job_keeps_its_retry_count_and_ready_time,
        a_job_without_updates_leaves_only_its_job_and_done_rows,
        text_that_the_database_cannot_store_does_not_stop_other_jobs,
        the_log_of_a_plain_job_is_complete,
        the_log_of_a_retried_job_is_complete,
        four_concurrent_reporters_keep_the_counters_exact;
    changes:
        a_waiting_job_is_cancelled_immediately,
        cancelling_a_running_job_requests_its_cancellation,
        a_job_with_a_cancel_request_is_not_requeued,
        a_job_may_complete_despite_a_cancel_request,
        a_finished_job_cannot_be_cancelled,
        a_manual_retry_gives_new_attempts_and_keeps_the_log,
        a_cancelled_job_can_be_retried,
        an_old_cancel_request_does_not_stop_a_retried_job,
        only_failed_and_cancelled_jobs_can_be_retried,
        a_patch_of_the_priority_moves_the_job,
        a_patch_of_the_payload_and_limits_is_seen_by_the_worker,
        a_patch_of_the_time_moves_the_job,
        a_patch_changes_the_expiry,
        a_patch_of_a_blocked_job_keeps_it_blocked,
        a_patch_of_a_retrying_job_keeps_it_retrying,
        the_next_attempt_of_a_retrying_job_can_be_moved,
        a_patch_of_name_and_tags_changes_how_the_job_is_found,
        a_retry_of_a_retrying_job_starts_its_next_attempt_now,
        running_and_finished_jobs_cannot_be_patched,
        a_deleted_job_leaves_nothing,
        a_running_job_cannot_be_deleted,
        changes_of_unknown_jobs_are_rejected;
    attempts:
        the_attempt_counts_runs_that_started_and_continues_after_a_manual_retry,
        a_run_that_did_not_start_is_an_attempt_only_if_it_failed;
    actors:
        a_created_job_names_its_caller_also_in_shared_transactions,
        jobs_of_schedules_and_brokers_name_what_created_them,
        a_bulk_action_names_who_began_it,
        everything_that_the_guardian_does_names_the_guardian,
        a_run_that_the_guardian_ends_names_the_guardian_and_others_do_not;
    audit:
        every_action_has_an_audit_entry_with_its_actor,
        a_rejected_action_leaves_no_audit_entry,
        entries_are_listed_latest_first_by_filter_and_in_pages,
        old_entries_are_deleted;
    dead_letters:
        dead_letters_are_found_by_error_and_reason,
        pages_of_a_search_show_every_dead_letter_once,
        jobs_of_every_state_are_found_by_their_error,
        jobs_are_found_oldest_first,
        the_attempts_of_all_runs_are_listed,
        a_dead_letter_is_retried_and_its_log_names_the_actor,
        only_dead_letters_are_retried_and_deleted_as_such,
        dead_letter_stats_have_reasons_and_the_oldest_and_newest,
        the_first_ready_time_of_each_lane_is_returned;
    bulk:
        an_action_proceeds_step_by_step_to_its_end,
        an_action_without_a_rate_has_its_audit_entry_at_the_end,
        a_step_is_processed_once_whichever_node_takes_it,
        concurrent_steps_count_once,
        jobs_that_changed_their_state_are_skipped,
        a_retry_that_a_unique_key_forbids_is_skipped,
        a_bulk_cancel_requests_cancellation_of_running_jobs_and_cancels_children_of_queued_ones,
        a_stopped_action_processes_nothing_more,
        old_finished_actions_are_deleted,
        an_unreadable_action_does_not_delay_others;
    nodes:
        started_jobs_of_a_dead_node_use_an_attempt,
        a_started_job_without_attempts_left_fails_when_its_node_dies,
        jobs_that_had_not_started_are_ready_again,
        a_live_node_shows_the_state_of_its_sources_and_inboxes,
        a_live_node_shows_its_version_and_when_it_was_last_seen,
        ended_jobs_of_a_dead_node_stay_ended,
        a_job_with_a_cancel_request_is_cancelled_when_its_node_dies,
        a_completion_after_recovery_is_stale,
        a_completion_before_recovery_stays,
        a_completion_after_recovery_and_another_claim_changes_nothing,
        concurrent_recovery_and_completion_never_both_count,
        a_node_that_leaves_returns_its_jobs_without_using_an_attempt,
        recovery_happens_once,
        claims_beyond_one_recovery_round_are_released_in_later_rounds,
        a_claim_whose_response_was_lost_is_released,
        the_log_of_a_lost_run_is_complete;
    workers:
        a_live_registration_is_resumed_only_with_its_token_or_api_key,
        a_rejected_registration_returns_the_deadline_of_the_live_worker,
        a_new_worker_passes_through_creating_and_connecting_to_ready,
        a_worker_whose_process_starts_becomes_ready_when_it_connects,
        a_worker_that_reconnects_keeps_its_jobs,
        a_worker_that_resumes_shows_the_version_of_its_new_program,
        jobs_in_flight_are_counted_per_worker,
        a_worker_that_moves_signals_its_old_node,
        twenty_concurrent_connections_under_one_key_are_one_worker,
        nothing_is_claimed_through_an_old_session,
        many_requests_in_one_call_share_the_ready_jobs,
        several_requests_are_answered_in_their_order,
        a_job_is_scheduled_while_its_worker_starts,
        jobs_name_their_worker,
        a_poll_returns_cancel_requests_for_the_nodes_workers,
        status_updates_of_workers_are_recorded,
        only_the_newest_changes_are_kept,
        a_worker_is_drained_by_its_key,
        live_workers_are_listed_first,
        capabilities_are_those_of_workers_that_accept_jobs,
        workers_of_all_nodes_that_are_ready_or_busy_are_counted,
        counters_follow_the_jobs_of_workers;
    lost_workers:
        the_jobs_of_a_lost_worker_use_an_attempt_started_or_not,
        a_worker_that_leaves_returns_its_jobs_without_using_an_attempt,
        a_registration_ends_once_and_only_through_its_session,
        a_worker_that_reconnects_after_its_end_has_a_new_registration,
        a_completion_after_the_loss_and_another_claim_changes_nothing,
        concurrent_loss_and_completion_never_both_count,
        concurrent_loss_and_claim_leave_no_job_with_a_lost_worker,
        concurrent_reconnection_and_claim_lose_no_job,
        a_job_that_kills_its_worker_runs_out_of_attempts,
        a_worker_keeps_its_jobs_when_its_server_dies,
        a_worker_that_does_not_reconnect_is_declared_lost,
        the_built_in_worker_of_a_dead_server_ends_with_it,
        the_deadline_of_a_worker_depends_on_its_transport,
        the_jobs_of_workers_without_a_server_are_listed_with_their_times,
        a_worker_lost_before_it_connected_was_never_assigned_its_job,
        a_server_that_leaves_detaches_its_workers,
        a_sweep_is_bounded_and_reports_that_more_is_due,
        a_claim_without_an_owner_is_found_however_its_owner_ended,
        a_workers_claim_whose_response_was_lost_is_released;
    lists:
        every_filter_finds_its_jobs,
        filters_work_together,
        a_search_finds_names_ids_and_keys,
        the_default_correlation_id_is_the_job_id,
        time_filters_apply_to_the_creation_time,
        pages_and_cursors_show_every_job_once,
        totals_do_not_depend_on_the_page,
        a_list_shows_the_same_as_a_single_job,
        jobs_are_found_by_name_worker_and_several_priorities,
        jobs_are_found_by_their_payload,
        lists_are_sorted_by_every_key_in_both_orders,
        a_cursor_of_another_sort_is_rejected,
        searches_and_sorts_stop_at_their_bound_and_say_so,
        pages_beyond_the_limit_are_rejected,
        counters_follow_the_jobs;
    webhooks:
        the_webhook_of_a_completed_job_contains_its_result,
        a_result_is_sent_byte_for_byte,
        the_webhook_of_a_failed_job_contains_its_error,
        a_job_cancelled_in_its_queue_sends_its_webhook,
        a_job_cancelled_in_flight_sends_its_webhook,
        an_expired_job_sends_its_webhook,
        a_job_without_a_handler_sends_its_webhook,
        a_permanently_lost_job_sends_its_webhook,
        a_lost_job_with_a_cancel_request_sends_its_webhook,
        a_cancelled_child_of_a_failed_parent_sends_its_webhook,
        a_job_cancelled_at_submit_sends_its_webhook,
        a_job_that_is_not_finished_sends_no_webhook,
        a_job_without_a_webhook_url_sends_nothing,
        a_repeated_end_sends_one_webhook,
        a_retried_job_sends_another_webhook_when_it_ends,
        a_delivery_has_everything_a_sender_needs,
        a_webhook_is_sent_until_it_is_delivered,
        the_outcome_of_a_webhook_follows_the_end_in_the_jobs_log,
        a_webhook_that_failed_too_often_is_settled,
        a_webhook_is_taken_by_one_sender_only,
        a_slow_host_does_not_delay_other_hosts,
        the_longest_due_webhook_is_sent_first,
        a_webhook_whose_sender_died_is_sent_by_another,
        webhooks_of_a_dead_sender_are_due_immediately,
        a_webhook_whose_senders_keep_dying_fails_after_a_few_extra_attempts,
        a_settled_webhook_can_be_redelivered,
        webhooks_are_found_by_state_job_and_host,
        deleting_a_job_deletes_its_settled_webhooks,
        a_webhook_still_to_be_delivered_survives_its_job,
        pruning_a_job_deletes_its_settled_webhooks;
    schedules:
        a_schedule_is_stored_as_it_was_written,
        a_due_time_becomes_a_job_once,
        a_job_with_jitter_waits_for_its_delay,
        concurrent_schedulers_fire_each_due_time_once,
        a_round_is_bounded_and_starts_with_the_longest_due,
        one_round_bounds_the_jobs_of_long_backlogs,
        an_unreadable_schedule_is_stopped_with_the_reason,
        a_job_that_cannot_be_stored_is_missed_and_others_fire,
        overlap_skip_skips_due_times_while_a_job_runs,
        queue_one_lets_one_job_wait_for_the_running_one,
        cancel_previous_starts_when_the_previous_job_has_stopped,
        a_manual_run_does_not_change_due_times,
        a_schedule_is_edited_disabled_and_enabled,
        a_deleted_schedule_does_not_fire_and_its_jobs_stay,
        every_action_on_a_schedule_has_an_audit_entry,
        old_ticks_are_deleted,
        ticks_are_listed_in_pages,
        schedules_are_found_by_name_and_state_whatever_the_name_contains,
        after_two_weeks_of_downtime_each_misfire_policy_applies_and_jobs_stay_bounded,
        ten_thousand_schedules_fire_in_ten_rounds;
    doctor:
        a_healthy_database_with_rows_in_every_table_has_no_finding,
        a_busy_healthy_server_has_no_finding,
        a_job_in_no_table_is_made_ready_again,
        a_job_in_no_table_keeps_its_retry_count,
        a_job_ready_and_waiting_stays_ready,
        a_finished_job_that_is_also_ready_stays_finished,
        a_job_in_flight_that_is_also_ready_is_not_claimed_twice,
        a_job_in_the_wrong_lane_is_moved,
        rows_of_jobs_that_do_not_exist_are_removed,
        a_wrong_counter_is_counted_again,
        a_claim_without_an_owner_is_released,
        the_claims_of_a_dead_server_are_released,
        an_unwatched_worker_gets_a_deadline,
        outbox_rows_without_an_event_or_a_sink_are_removed,
        a_running_row_without_a_claim_is_removed,
        a_blocked_job_without_parents_is_released,
        a_blocked_job_whose_next_check_is_too_late_is_checked_now,
        run_numbers_in_use_are_skipped,
        a_missing_run_sequence_is_recreated,
        an_invalid_setting_is_reported,
        a_unique_key_of_a_finished_job_is_freed,
        a_ready_job_without_its_key_gets_it,
        a_key_with_ready_jobs_gets_its_key_queue,
        a_closed_key_queue_that_nothing_opens_is_opened,
        a_stale_row_of_a_key_in_flight_is_removed,
        a_job_in_flight_counts_for_the_limit_of_its_key_again,
        a_webhook_and_a_bulk_action_without_a_due_time_get_one;
    doctor_reports:
        overdue_rows_are_reported,
        unknown_states_are_reported,
        a_missing_lane_is_reported,
        an_unreadable_job_is_reported,
        a_log_that_is_damaged_or_has_gaps_is_reported,
        a_finding_lists_twenty_jobs_and_counts_the_rest,
        a_repair_has_an_audit_entry,
        a_claim_of_an_unknown_node_is_found,
        an_active_schedule_without_a_due_time_gets_one,
        overdue_and_unreadable_schedules_are_reported,
        due_times_with_no_job_or_two_jobs_are_reported;
    limits:
        no_claim_and_no_outcome_exceeds_a_limit,
        a_limit_allows_another_job_however_the_first_ends,
        a_limit_of_two_allows_only_the_first_two_jobs,
        a_shared_limit_orders_by_score_and_not_by_lane,
        prefetching_leaves_jobs_for_other_workers,
        a_blocked_key_does_not_delay_others,
        a_key_below_its_limit_is_found_behind_many_keys_at_their_limit,
        one_key_in_two_lanes_shares_its_limit,
        the_end_of_a_job_under_a_limit_is_signalled,
        settings_made_through_the_api_override_the_configuration_until_they_are_reset,
        a_limit_can_be_raised_lowered_and_removed_while_jobs_run,
        the_log_of_a_job_names_the_limit_it_waited_for,
        keyed_jobs_have_a_key_queue_however_they_became_ready,
        keyed_jobs_in_lanes_without_keys_still_run,
        many_workers_in_one_call_share_what_a_limit_allows,
        prefetching_does_not_delay_other_requests_of_the_same_call;
    rates:
        a_rate_allows_a_burst_of_its_count_and_then_one_start_at_a_time,
        a_rate_is_charged_only_for_claimed_jobs,
        no_job_of_a_paused_queue_is_claimed_until_it_is_resumed,
        a_fair_queue_serves_its_keys_round_robin,
        without_fairness_the_longest_waiting_job_goes_first,
        the_tokens_of_a_rate_survive_a_restart;
    model:
        any_sequence_of_operations_agrees_with_the_model;
}
