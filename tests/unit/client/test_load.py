from trivet.client.inference_client import ServerLoad, read_load

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 8.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""


def test_the_engines_of_a_server_are_summed_and_other_metrics_left_alone():
    assert read_load(METRICS) == ServerLoad(num_running=20, num_waiting=3, num_preemptions=4)


def test_a_server_that_does_not_say_has_no_load():
    assert read_load("process_cpu_seconds_total 1.0\n") is None
    assert read_load("") is None
