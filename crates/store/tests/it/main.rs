//! What the store promises, as sentences. Each is proved on SQLite and on PostgreSQL, each time on a database of its own; after
//! each the tables are checked as a whole (`Ledger::prove`).
//!
//! PostgreSQL is the server that FAENA_TEST_POSTGRES names; without it `postgres::…` fails. `--skip postgres::` leaves it out.

#![allow(clippy::unwrap_used, reason = "a test that meets an error it does not expect should stop there")]

mod audit;
mod bulk;
mod changes;
mod claims;
mod doctor;
mod ends;
mod events;
mod dependents;
mod following;
mod foreign;
mod keys;
mod dead_letters;
mod limits;
mod lists;
mod model;
mod nodes;
mod only;
mod schedules;
mod outbox;
mod submits;
mod support;
mod times;
mod webhooks;
mod workers;

/// One list, two engines: `module: sentence, sentence; …` becomes `sqlite::sentence` and `postgres::sentence`.
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
    submits:
        a_submitted_job_can_be_read_back,
        a_batch_is_answered_in_its_order,
        a_payload_is_kept_to_the_letter,
        every_option_survives_alone_and_in_a_batch,
        a_job_for_later_waits,
        a_job_whose_time_has_passed_is_ready,
        an_unknown_job_is_not_there,
        strings_that_look_like_sql_or_keys_are_just_strings;
    events:
        a_job_tells_its_whole_story_in_order,
        a_job_that_fails_and_fails_again_tells_of_each_try,
        events_name_who_did_it,
        only_what_is_wanted_is_written_down,
        a_wish_that_is_not_repeated_is_forgotten_and_events_cost_nothing_again,
        wishes_outlive_the_server_that_made_them,
        an_act_that_is_refused_tells_nothing,
        a_queued_event_waits_once_for_every_sink_that_wants_it,
        whatever_happens_the_events_of_a_job_end_where_it_stands,
        a_job_from_before_that_is_changed_is_not_told_as_new,
        a_hand_out_tells_which_try_it_is,
        what_is_gone_leaves_no_counter_behind,
        what_nobody_wants_any_more_is_still_pruned;
    outbox:
        what_happened_waits_for_its_sink_in_order_until_it_is_confirmed,
        as_much_is_taken_as_was_asked_for,
        two_nodes_share_the_parts_and_never_both_have_one,
        nodes_that_ask_at_once_never_both_have_a_part,
        a_node_that_dies_is_replaced_after_its_lease_and_one_that_leaves_at_once,
        a_lease_is_renewed_by_asking,
        a_sink_that_nobody_wants_has_nothing,
        a_refused_message_holds_back_its_subject_only,
        five_refusals_make_a_dead_letter_that_tells_everything,
        a_sink_that_skips_goes_on_without_a_dead_letter_and_one_that_parks_waits_for_it,
        a_dead_letter_that_is_resolved_says_by_whom_and_why,
        dead_letters_are_replayed_in_order_under_their_own_ids_at_a_pace,
        a_replayed_letter_goes_before_what_was_parked_behind_it,
        dead_letters_are_found_by_filter_and_in_pages,
        sent_events_of_a_time_are_published_again_but_not_what_waits,
        a_sink_that_is_down_says_since_when_and_why_and_costs_no_message_a_try,
        late_news_of_a_lost_part_count_if_they_are_good,
        every_event_is_sent_or_waits_or_is_dead,
        what_waits_or_is_dead_is_not_pruned,
        a_message_from_outside_makes_its_jobs_once_per_consumer,
        a_message_that_comes_twice_at_once_makes_its_jobs_once,
        a_message_whose_jobs_are_refused_is_not_dealt_with,
        what_came_in_long_ago_is_forgotten;
    following:
        who_follows_while_many_write_sees_every_event_once_and_each_subject_in_order,
        what_nobody_wanted_meanwhile_is_outside_of_what_is_kept,
        what_was_removed_as_old_is_outside_of_what_is_kept,
        a_wish_that_is_repeated_keeps_what_it_has;
    keys:
        a_repeated_idempotency_key_answers_with_the_first_job,
        an_idempotency_key_for_another_body_is_refused,
        twenty_at_once_with_one_idempotency_key_make_one_job,
        a_batch_repeated_under_its_idempotency_keys_makes_nothing_new,
        one_idempotency_key_twice_in_a_batch_makes_one_job,
        one_idempotency_key_for_two_bodies_in_a_batch_is_refused,
        a_child_of_a_repeated_job_depends_on_the_first_one,
        a_unique_key_is_held_until_its_job_has_finished,
        a_unique_key_twice_in_a_batch_is_refused,
        twenty_at_once_with_one_unique_key_leave_one_job,
        a_repeated_request_with_both_keys_answers_with_the_first_job,
        a_unique_key_is_free_after_every_way_to_finish,
        a_retry_by_a_person_takes_the_unique_key_again,
        a_retry_by_a_person_is_refused_while_another_has_the_unique_key,
        a_refused_batch_leaves_no_key_behind,
        a_job_that_is_cancelled_at_once_holds_no_unique_key;
    dependents:
        an_unknown_parent_is_refused_and_nothing_is_stored,
        a_child_waits_for_all_its_parents,
        a_child_of_a_finished_and_an_open_parent_waits_for_the_open_one_only,
        a_child_of_finished_parents_is_ready_at_once,
        a_child_of_a_failed_or_cancelled_parent_is_cancelled_at_once,
        a_failed_parent_cancels_its_children_down_the_chain,
        a_child_that_runs_anyway_runs_after_a_failed_parent,
        a_retried_child_waits_for_a_parent_that_was_retried_before_it,
        a_child_with_a_time_waits_for_it_after_its_parents,
        two_parents_that_end_at_once_free_their_child_once,
        a_deleted_parent_cancels_its_child,
        a_cancelled_parent_cancels_its_child,
        an_expired_parent_cancels_its_child,
        a_parent_lost_for_good_cancels_its_child,
        a_missed_word_is_caught_by_looking_again,
        looking_again_does_not_hurry_a_sibling_that_waits_for_its_time,
        a_graph_in_one_batch_runs_in_order,
        a_child_cancelled_by_a_person_leaves_its_parents_alone;
    times:
        delayed_jobs_become_ready_in_the_order_of_their_times,
        a_promotion_is_bounded_and_says_that_there_is_more,
        the_next_due_time_is_told,
        a_ready_job_expires,
        a_waiting_job_expires,
        a_running_job_does_not_expire_while_it_runs,
        a_job_that_comes_back_after_its_expiry_expires,
        a_retried_expired_job_runs,
        a_finished_job_does_not_expire,
        jobs_that_nobody_can_run_are_given_up,
        old_finished_jobs_are_pruned_by_state_and_leave_nothing,
        pruning_is_bounded,
        pruning_forgets_old_requests_to_cancel_but_not_of_running_jobs,
        a_poll_tells_what_there_is_to_do,
        signals_tell_of_ready_waiting_and_cancelled_jobs;
    claims:
        a_claim_goes_by_score_so_waiting_makes_up_for_priority,
        a_strict_queue_never_lets_a_lower_priority_pass,
        equal_scores_go_by_id,
        queues_take_turns,
        a_claim_gives_only_what_was_asked_for,
        a_lane_asked_for_twice_gives_its_jobs_once,
        a_claim_carries_all_that_a_worker_needs,
        a_job_is_handed_to_one_worker_only,
        a_job_that_becomes_ready_before_the_last_claimed_one_is_found,
        run_numbers_only_grow;
    ends:
        a_completed_job_shows_its_result,
        many_ends_in_one_call_are_answered_in_order,
        a_started_job_is_processing,
        progress_messages_and_steps_are_kept_and_shown,
        a_step_is_kept_once_and_survives_the_run,
        steps_move_the_progress,
        told_progress_wins_over_counted_steps,
        the_steps_of_several_jobs_are_read_at_once,
        a_report_that_came_too_late_is_written_down,
        notes_of_a_stale_run_change_nothing,
        the_same_end_told_again_counts_once,
        the_same_end_twice_in_one_call_counts_once,
        another_end_of_an_ended_run_changes_nothing,
        an_end_after_its_block_was_closed_is_stale_unless_it_was_told_before,
        a_report_of_a_deleted_job_changes_nothing,
        a_failed_try_waits_and_comes_back_with_its_count,
        a_job_that_failed_for_good_stands_among_the_dead,
        a_job_handed_back_keeps_its_count_and_its_place,
        a_plain_job_leaves_only_what_it_needs,
        text_that_the_database_cannot_hold_does_not_stop_the_others,
        the_log_of_a_plain_job_is_whole,
        the_log_of_a_retried_job_is_whole,
        four_reporters_at_once_count_right;
    changes:
        a_waiting_job_is_cancelled_at_once,
        a_running_job_is_asked_to_stop,
        a_job_asked_to_stop_does_not_come_back,
        a_job_may_complete_though_it_was_asked_to_stop,
        a_finished_job_cannot_be_cancelled,
        a_retry_by_a_person_gives_new_tries_and_keeps_the_log,
        a_cancelled_job_can_be_retried,
        an_old_request_to_cancel_does_not_stop_a_retried_job,
        only_failed_and_cancelled_jobs_can_be_retried,
        a_patch_of_the_priority_moves_the_job,
        a_patch_of_the_payload_and_limits_is_seen_by_the_worker,
        a_patch_of_the_time_moves_the_job,
        a_patch_of_the_expiry_counts,
        a_patch_of_a_blocked_job_keeps_it_blocked,
        a_patch_of_a_retrying_job_keeps_it_retrying,
        running_and_finished_jobs_cannot_be_patched,
        a_deleted_job_leaves_nothing,
        a_running_job_cannot_be_deleted,
        changes_of_unknown_jobs_say_so;
    audit:
        every_act_is_written_down_with_who_did_it,
        a_refused_act_leaves_no_entry,
        entries_are_listed_latest_first_by_filter_and_in_pages,
        old_entries_are_forgotten;
    dead_letters:
        letters_are_found_by_what_they_say,
        pages_of_a_search_show_every_letter_once,
        only_failed_jobs_are_searched_for_what_they_say,
        jobs_are_found_upwards_from_the_oldest,
        the_history_of_all_runs_is_told,
        a_letter_is_retried_and_its_log_says_by_whom,
        only_letters_are_retried_and_deleted_as_such,
        letters_are_counted_by_reason_and_age,
        the_first_ready_job_of_each_lane_is_told;
    bulk:
        an_action_goes_step_by_step_to_its_end,
        an_action_without_a_rate_is_written_down_when_it_is_done,
        a_step_counts_once_whoever_makes_it,
        two_that_step_at_once_step_once,
        jobs_that_have_moved_on_are_left_alone,
        a_retry_that_a_unique_key_forbids_is_skipped,
        running_jobs_are_asked_and_children_hear_of_it,
        a_stopped_action_stays_where_it_is,
        actions_that_are_long_over_are_forgotten,
        an_action_that_is_not_understood_holds_nobody_up;
    nodes:
        started_jobs_of_a_dead_node_cost_a_try,
        a_started_job_without_tries_left_fails_when_its_node_dies,
        jobs_that_had_not_started_are_ready_again,
        ended_jobs_of_a_dead_node_stay_ended,
        a_job_asked_to_stop_is_cancelled_when_its_node_dies,
        a_completion_after_the_rescue_is_stale,
        a_completion_before_the_rescue_stands,
        a_completion_after_the_rescue_and_another_claim_changes_nothing,
        rescue_and_completion_at_once_never_both_count,
        a_node_that_leaves_hands_back_without_cost,
        rescue_happens_once,
        more_blocks_than_one_round_takes_are_all_freed,
        a_claim_whose_answer_was_lost_is_given_back,
        the_log_of_a_lost_run_is_whole;
    workers:
        a_worker_begins_its_life_through_allowed_states,
        a_worker_that_is_being_made_becomes_ready_when_it_connects,
        a_worker_that_connects_anew_goes_on_with_its_jobs,
        a_worker_that_moves_tells_its_old_node,
        twenty_that_connect_at_once_under_one_name_are_one_worker,
        nothing_is_handed_out_through_an_old_connection,
        many_asks_in_one_call_share_out_what_there_is,
        several_asks_are_answered_in_their_order,
        a_job_waits_for_a_worker_that_is_coming,
        jobs_name_their_worker,
        the_jobs_of_a_lost_worker_cost_a_try_started_or_not,
        a_worker_that_leaves_hands_back_without_cost,
        a_life_ends_once_and_only_through_its_connection,
        a_worker_that_comes_back_after_its_end_has_a_new_life,
        a_completion_after_the_loss_and_another_claim_changes_nothing,
        loss_and_completion_at_once_never_both_count,
        loss_and_claim_at_once_leave_nothing_in_dead_hands,
        reconnection_and_claim_at_once_lose_no_job,
        a_job_that_kills_its_worker_is_found_out,
        a_worker_keeps_its_jobs_when_its_server_dies,
        a_worker_that_does_not_come_back_is_given_up,
        the_workers_inside_a_dead_server_end_with_it,
        how_long_a_worker_is_waited_for_depends_on_its_door,
        a_server_that_leaves_lets_its_workers_go,
        a_sweep_is_bounded_and_says_that_there_is_more,
        a_block_is_found_whatever_became_of_its_owner,
        a_claim_of_a_worker_whose_answer_was_lost_is_given_back,
        a_node_hears_of_requests_to_cancel_for_its_workers,
        news_of_workers_are_written_down,
        only_the_newest_changes_are_kept,
        a_worker_is_asked_to_drain_by_its_name,
        workers_are_listed_the_living_first,
        worker_capabilities_are_those_of_workers_that_take_jobs,
        counters_follow_the_jobs_of_workers;
    lists:
        every_filter_finds_its_jobs,
        filters_work_together,
        a_search_finds_names_ids_and_keys,
        the_default_correlation_id_is_the_job_id,
        time_bounds_are_by_creation,
        pages_and_cursors_show_every_job_once,
        totals_do_not_depend_on_the_page,
        pages_beyond_the_bound_are_refused,
        counters_follow_the_jobs;
    webhooks:
        a_completed_job_tells_its_result,
        a_result_is_told_to_the_letter,
        a_failed_job_tells_its_error,
        a_job_cancelled_in_line_tells_it,
        a_job_cancelled_in_its_workers_hands_tells_it,
        an_expired_job_tells_it,
        a_job_that_nobody_can_run_tells_it,
        a_job_lost_for_good_tells_it,
        a_job_cancelled_while_it_is_lost_tells_it,
        a_child_of_a_failed_parent_tells_it,
        a_job_cancelled_at_submit_tells_it,
        a_job_that_goes_on_tells_nothing,
        a_job_without_an_address_tells_nothing,
        an_end_told_again_is_told_to_the_world_once,
        a_retried_job_that_ends_again_tells_again,
        a_sender_gets_all_that_it_needs,
        a_webhook_is_sent_until_it_is_delivered,
        what_became_of_a_webhook_stands_after_the_end_of_its_job,
        a_webhook_that_failed_too_often_is_over,
        a_webhook_is_handed_to_one_sender_only,
        what_one_host_keeps_waiting_stands_in_no_others_way,
        the_longest_due_goes_first,
        a_webhook_whose_sender_died_is_sent_by_another,
        what_a_server_that_is_gone_was_sending_is_due_at_once,
        senders_that_die_do_not_use_up_the_last_try_but_not_for_ever,
        a_webhook_that_is_over_can_be_sent_again_by_hand,
        webhooks_are_found_by_state_job_and_host,
        a_deleted_job_takes_its_settled_webhooks_along,
        a_webhook_still_to_be_delivered_survives_its_job,
        a_pruned_job_takes_its_settled_webhooks_along;
    schedules:
        a_schedule_is_kept_as_it_was_said,
        a_due_time_becomes_a_job_once,
        a_job_with_jitter_waits_its_while,
        many_that_fire_at_once_fire_each_due_time_once,
        a_round_is_bounded_and_the_longest_due_goes_first,
        one_round_takes_only_so_many_jobs_of_long_backlogs,
        a_schedule_that_cannot_be_read_stands_aside_with_the_reason,
        a_job_that_cannot_be_stored_is_missed_and_others_fire,
        skip_waits_for_the_job_that_is_going,
        queue_one_lets_one_job_wait_for_the_one_that_is_going,
        cancel_previous_begins_when_the_one_before_has_stopped,
        a_run_by_hand_leaves_due_times_alone,
        a_schedule_is_edited_switched_off_and_on,
        a_deleted_schedule_does_not_fire_and_its_jobs_stay,
        every_act_on_a_schedule_is_written_down,
        old_records_of_due_times_are_forgotten,
        records_are_listed_in_pages,
        schedules_are_found_by_name_and_state_whatever_it_looks_like,
        after_two_weeks_each_policy_does_what_it_says_and_there_is_no_flood,
        ten_thousand_schedules_fire_in_ten_rounds;
    doctor:
        a_sound_database_with_something_of_everything_has_no_finding,
        a_busy_healthy_server_has_no_finding,
        a_job_in_no_place_is_put_back_into_its_line,
        a_job_in_no_place_keeps_its_count_of_tries,
        a_job_ready_and_waiting_stays_ready,
        a_finished_job_that_is_also_ready_stays_finished,
        a_held_job_that_is_also_ready_is_not_handed_out_twice,
        a_job_in_the_wrong_lane_is_moved,
        rows_of_jobs_that_are_not_there_are_removed,
        a_wrong_counter_is_counted_again,
        a_hand_out_of_nobody_is_taken_back,
        what_a_dead_server_held_is_taken_back,
        a_worker_that_nobody_watches_gets_a_deadline,
        what_waits_in_the_outbox_for_nothing_is_removed,
        a_mark_of_running_without_a_hand_out_is_removed,
        a_job_that_waits_for_nobody_goes_on,
        a_job_that_would_look_for_its_parents_too_late_looks_now,
        run_numbers_that_would_come_again_are_skipped,
        a_sequence_of_runs_that_is_gone_is_made_anew,
        a_setting_that_makes_no_sense_is_told,
        a_unique_key_of_a_finished_job_is_freed,
        a_ready_job_without_its_key_gets_it,
        a_key_with_ready_jobs_gets_its_line,
        a_line_that_nothing_would_open_is_opened,
        a_place_under_a_limit_that_nobody_uses_is_given_free,
        a_held_job_counts_for_the_limit_of_its_key_again,
        a_webhook_and_a_bulk_action_without_a_time_get_one,
        what_nobody_moves_is_told,
        states_that_do_not_exist_are_told,
        a_lane_that_is_missing_is_told,
        a_job_that_cannot_be_read_is_told,
        a_log_that_is_damaged_or_has_gaps_is_told,
        a_finding_names_twenty_and_counts_the_rest,
        a_repair_is_written_in_the_audit_log,
        a_claim_of_an_unknown_node_is_found,
        a_schedule_without_a_time_gets_it,
        schedules_that_nobody_fires_or_understands_are_told,
        due_times_without_or_with_two_jobs_are_told;
    limits:
        limits_are_never_exceeded_whoever_claims_and_however_jobs_end,
        a_slot_comes_back_after_every_way_to_end,
        a_limit_lets_go_exactly_as_many_in_order,
        a_shared_limit_goes_by_score_not_by_lane,
        what_is_claimed_ahead_leaves_room_for_others,
        a_blocked_key_does_not_delay_others,
        many_blocked_keys_in_front_hide_nobody,
        one_key_in_two_lanes_shares_its_limit,
        the_end_of_a_job_that_counts_is_told,
        what_was_said_at_run_time_outlives_the_configuration_until_it_is_reset,
        a_limit_can_be_raised_lowered_and_removed_while_jobs_run,
        a_rate_gives_its_count_and_then_one_by_one,
        a_rate_takes_no_more_than_was_started,
        a_paused_queue_gives_nothing_until_it_is_resumed,
        keys_take_turns_in_a_fair_queue,
        without_fairness_who_has_waited_longest_goes_first,
        a_job_that_waited_for_a_limit_says_so,
        jobs_with_keys_stand_in_line_whichever_way_they_come,
        jobs_with_keys_from_before_there_were_lines_still_run,
        many_workers_in_one_call_share_what_a_limit_lets_go,
        who_claims_ahead_does_not_keep_the_others_of_its_call_waiting,
        what_is_left_of_a_rate_outlives_a_restart;
    model:
        any_sequence_of_verbs_keeps_to_the_model;
}
