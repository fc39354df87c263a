"""What may happen to a run of several processes, and the test that holds each case.

Groups are those of the review that made them. A test's id begins with the text here.
"""

MOMENTS = "test_moments.py::test_"
KILLED = MOMENTS + "a_process_that_is_killed_ends_the_other"
ERROR = MOMENTS + "an_error_of_one_is_told_to_the_other"
SIGNAL = MOMENTS + "a_signal_to_one_ends_all_saved_or_says_why"
LEAVES = "test_ends.py::test_one_that_leaves_ends_the_other_in_a_sentence"
OTHER = "test_differences.py::test_other_"
FAULTS, SEVERAL = "test_faults.py::test_", "test_several.py::test_"
MEETING, SLURM = "test_rendezvous.py::test_", "test_slurm.py::test_"
STRANGERS, IDENTITY = "test_strangers.py::test_", "test_identity.py::test_"
LAUNCHER = "test_local.py::test_the_launchers_end_is_that_of_its_processes"
MPIRUN = SLURM + "ranks_of_mpirun_in_an_allocation_have_places_of_their_own"
LOST_JOB = SLURM + "a_job_that_lost_a_process_is_queued_again"

KILLS = ("import", "compile", "step", "save", "evaluation", "end")
CASES = {
    "kill -9": {
        f"{moment}, process {index}": f"{KILLED}[{moment}-{index}]"
        for moment in KILLS
        for index in (0, 1)
    },
    "kill -9, further": {
        "0 of 4": MOMENTS + "a_killed_process_of_four_ends_the_others[0]",
        "2 of 4": MOMENTS + "a_killed_process_of_four_ends_the_others[2]",
        "on a host of its own, 0": FAULTS + "a_killed_process_ends_the_other[0]",
        "on a host of its own, 1": FAULTS + "a_killed_process_ends_the_other[1]",
        "twice in --restarts=3": "test_local.py::test_all_start_again_at_another_port",
        "and resumed bitwise": "test_local.py::test_a_run_that_lost_a_process_ends_as",
        "a task of Slurm": LOST_JOB + "[sleep 3",
        "SIGTERM to 1, kill -9 of 0": MOMENTS + "one_is_told_to_end_while_the_other_is",
    },
    "SIGSTOP": {
        "0": FAULTS + "a_stopped_process_ends_the_other_and_then_itself[0]",
        "1": FAULTS + "a_stopped_process_ends_the_other_and_then_itself[1]",
        "one that is silent": "test_heartbeat.py::test_one_that_is_silent_is_lost",
        "and its launcher": "test_local.py::test_a_stopped_process_does_not_keep_the",
    },
    "error of one": {
        "data, RuntimeError": ERROR + "[data-raise RuntimeError",
        "data, code of its own": SEVERAL + "an_error_of_one_process_that_would_come",
        "data, OSError": ERROR + "[data-raise OSError",
        "data, MemoryError": ERROR + "[data-raise MemoryError",
        "data, SIGSEGV": ERROR + "[data-SIGSEGV",
        "data, os._exit(0)": ERROR + "[data-os._exit(0)",
        "model": ERROR + "[compile-raise ValueError",
        "evaluation": ERROR + "[evaluation-raise KeyError",
        "writer": ERROR + "[writer-raise RuntimeError",
        "hook": ERROR + "[step-raise LookupError",
        "a BaseException of a user's own": LEAVES + "[raise Own",
    },
    "SystemExit of one, and NCCL's own error": {
        "data": ERROR + "[data-sys.exit(3)",
        "hook": ERROR + "[step-sys.exit(0)",
        "of all": "test_ends.py::test_all_that_leave_have_their_own_code[0]",
        "NCCL": "test_ends.py::test_collectives_that_fail_with_all_processes_there",
    },
    "slow": {
        "by 40 s": MOMENTS + "a_wrong_clock_or_a_slow_process_ends_nothing[40]",
        "hangs": FAULTS + "a_process_whose_data_hang_ends_both[1]",
        "holds Python's lock": STRANGERS + "a_process_that_keeps_pythons_lock_for_40_s",
    },
    "what differs in one": {
        "JAX": MEETING + "a_process_of_another_run_is_named_to_both[other0",
        "own code": OTHER + "code_of_the_template[initial parameters]",
        "seed": OTHER + "keys_of_the_config[seed",
        "threefry": OTHER + "options[JAX_THREEFRY",
        "learning rate": SEVERAL + "processes_that_were_told_something_else_say_what",
        "steps": OTHER + "keys_of_the_config[num_steps",
        "devices": SEVERAL + "processes_with_other_numbers_of_devices_say_so",
        "matmul precision": OTHER + "options[JAX_DEFAULT_MATMUL",
        "XLA_FLAGS": OTHER + "options[XLA_FLAGS",
        "sizes of data": SEVERAL + "processes_with_other_data_say_how_much[False]",
    },
    "code, x64, --dry_run, contents": {
        "the template's code": OTHER + "code_of_the_template[model]",
        "its data's code": OTHER + "code_of_the_template[data]",
        "x64": OTHER + "options[JAX_ENABLE_X64",
        "--dry_run": "test_differences.py::test_a_dry_run_of_one",
        "contents of data": OTHER + "data[contents",
    },
    "full disk": {
        str(i): MOMENTS + f"a_full_disk_ends_both_with_its_code[{i}]" for i in (0, 1)
    },
    "workdir": {
        "not shared": STRANGERS + "a_workdir_on_each_hosts_own_disk_is_said_before_ste",
        "not shared, requeued": SEVERAL + "a_process_that_does_not_see_the_checkpoints",
        "lock of a stopped one": SEVERAL + "a_run_waits_for_the_lock_of_its_stopped",
    },
    "joining": {
        "3 of 4": MEETING + "a_missing_process_is_named_to_all_that_came",
        "no process 0": MEETING + "an_address_where_nobody_is_says_so_in_time",
        "another count": MEETING + "a_process_of_another_run_is_named_to_both[other2",
        "an id twice": MEETING + "two_with_the_same_number_are_refused",
        "port taken": MEETING + "a_port_that_is_taken_is_named",
        "no such name": MEETING + "a_name_that_nobody_knows_says_so_in_time",
        "late": SEVERAL + "a_process_waits_so_long_for_the_others_as_it_is_told",
    },
    "one port": {
        **{
            f"two runs, {pause} s apart": STRANGERS
            + f"of_two_runs_at_one_port_the_second_ends_in_a_sentence[{pause}]"
            for pause in (0, 2, 3)
        },
        "JAX_COORDINATOR_BIND_ADDRESS": STRANGERS + "jaxs_variable_for_the_address_to",
    },
    "strangers": {
        "garbage, jaxlib's client": STRANGERS + "strangers_at_the_port_of_a_run_end_no",
        "idle connections": IDENTITY + "idle_connections_hold_no_start",
        "forged hello": IDENTITY + "a_forged_hello_takes_no_place_and_ends_nothing",
        "overheard hello": IDENTITY + "a_hello_that_was_overheard_joins_nothing",
        "a line without an end": IDENTITY + "a_line_has_a_limit",
        "words for a terminal": IDENTITY
        + "words_of_another_process_command_no_termina",
        "at the rendezvous": MEETING + "a_stranger_at_the_port_is_passed_over",
    },
    "network": {
        "12 s flap": FAULTS + "a_link_that_is_cut_for_12_s_is_survived",
        "cut in one direction": FAULTS
        + "a_link_that_is_cut_in_one_direction_ends_both",
        "cut": FAULTS + "a_cut_link_ends_both",
    },
    "clock": {
        "7 days ahead": MOMENTS + "a_wrong_clock_or_a_slow_process_ends_nothing[clock]"
    },
    "SIGTERM, SIGINT": {
        "import": SIGNAL + "[import-SIGTERM-2]",
        "compile": SIGNAL + "[compile-SIGTERM-2]",
        "step": SIGNAL + "[step-SIGTERM-2]",
        "step, process 0": SEVERAL + "sigterm_to_one_process_saves_the_same_step_in_b",
        "resumed": SEVERAL + "sigterm_before_the_first_step_of_a_resumed_run_is_not_lo",
        "4 processes": SIGNAL + "[step-SIGTERM-4]",
        "end": SEVERAL + "processes_that_are_done_wait_for_no_longer_than_the_last",
        "SIGINT": SIGNAL + "[step-SIGINT-2]",
    },
    "SIGHUP, SIGUSR1": {
        name: f"{SIGNAL}[step-{name}-2]" for name in ("SIGHUP", "SIGUSR1")
    },
    "starts": {
        "local.py, 2": SEVERAL + "four_devices_are_four_in_any_number_of_processes[2-2",
        "local.py, 4": SEVERAL + "four_devices_are_four_in_any_number_of_processes[4-1",
        "mpi.sh": "test_mpi.py::test_sigterm_saves_a_run_which_resumes_on_two_hosts",
        "sbatch": SLURM + "a_preempted_job_is_queued_again_and_ends_its_run",
        "mpirun in an allocation": MPIRUN + "[2]",
    },
    "launchers": {
        "mpirun, 2 ranks a node": MPIRUN + "[4]",
        "requeue loop": SLURM + "starts_that_save_nothing_new_end_the_job",
        **{f"SIG{x}": f"{LAUNCHER}[{x}]" for x in ("KILL", "HUP", "USR1", "INT")},
    },
}
