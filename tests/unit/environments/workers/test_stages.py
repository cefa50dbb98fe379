from trivet.environments.workers.stages import Stage, StageBoard


def test_the_board_counts_rollouts_by_stage_and_the_age_of_the_oldest_scoring():
    now = 0.0
    board = StageBoard(clock=lambda: now)
    with board.stage(Stage.GENERATING, num_rollouts=4), board.stage(Stage.SCORING, num_rollouts=2):
        now = 5.0
        with board.stage(Stage.SCORING, num_rollouts=3):
            now = 7.0
            counts = board.counts()
            assert (counts.num_generating, counts.num_scoring, counts.scoring_for_s) == (4, 5, 7.0)
    counts = board.counts()
    assert (counts.num_generating, counts.num_scoring, counts.scoring_for_s) == (0, 0, 0.0)
