"""The queries in docs/columns.md, by what they answer."""

QUERIES = {
    "operators by self time, of all ranks": """\
select name, sum(count) as calls, sum(self) / 1e6 as self_ms, sum(total) / 1e6 as total_ms
from events where kind = 'operator' group by name order by self_ms desc limit 20""",
    "modules by the time and memory of what runs in them": """\
select module, sum(self) / 1e6 as self_ms, sum(allocated) as bytes, sum(flops) as flops
from events where module is not null group by module order by self_ms desc""",
    "slowest steps, and how much slower than the median": """\
select file, step, total / 1e6 as ms, total / median(total) over (partition by file) as times
from steps order by times desc limit 10""",
    "what slow steps have more of than others": """\
with slow as (select file, step, total > 1.5 * median(total) over (partition by file) as is_slow from steps),
  sums as (select file, step, name, sum(self) as self from events group by all)
select name, avg(self) filter (is_slow) / 1e6 as slow_ms, avg(self) filter (not is_slow) / 1e6 as other_ms
from sums join slow using (file, step) group by name
order by coalesce(slow_ms, 0) - coalesce(other_ms, 0) desc limit 10""",
    "time of each phase by rank": """\
select phase, rank, sum(self) / 1e6 as ms from events group by all order by phase, ms desc""",
    "shapes of the most expensive operator": """\
select name, input_shapes, sum(count) as calls, sum(self) / sum(count) / 1e3 as us_each
from events where input_shapes is not null group by all order by sum(self) desc limit 10""",
    "operators that allocate most": """\
select name, sum(allocated) as bytes, sum(self_cpu_memory_usage) as still_allocated
from events group by name having bytes > 0 order by bytes desc limit 10""",
    "what calls an operator": """\
select caller.name, sum(called.count) as calls, sum(called.total) / 1e6 as ms
from events called join events caller on caller.id = called.parent and caller.file = called.file
where called.name = 'aten::addmm' group by all order by ms desc""",
    "the rank that comes last to collectives, by the clocks of the ranks": """\
with arrivals as (select c.*, epoch_ns(e.start) as arrived,
    max(epoch_ns(e.start)) over (partition by "group", c.sequence_nr, repeat) as latest
  from collectives c join events e on e.id = c.event and e.file = c.file)
select rank, count(*) filter (arrived = latest) as times_last, avg(latest - arrived) / 1e6 as earlier_ms
from arrivals group by rank order by times_last desc""",
    "lines of Python by sampled time": """\
select line, count(*) as samples, sum(duration) / 1e6 as ms from samples group by line order by ms desc limit 20""",
}
"""Ten of DuckDB's ``SELECT`` statements."""
