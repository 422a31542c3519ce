"""The page where jobs run on other machines: a real node, behind real OpenSSH."""

import contextlib

import live
import network
import pytest
from pages import cancel, go_home, machine, open_log, row, visit
from playwright.sync_api import expect


@pytest.fixture(scope="module")
def net():
    with network.Net(nodes=1, gpus=2, head_gpus=1) as made, contextlib.ExitStack() as stack:
        done = made.head.nexus("node", "add", "n1")
        assert done.returncode == 0, done.stderr
        made.port = stack.enter_context(network.relay(made))
        yield made


def visit_net(browser, net, path=""):
    token = live.read(net.head.home / "token").strip()
    return visit(browser, net, path, extra_http_headers={"Authorization": f"Bearer {token}"})


def test_a_job_of_a_node_from_the_form_to_its_end(browser, net):
    with visit_net(browser, net) as page:
        page.get_by_role("button", name="Add job").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Command").fill("hostname; sleep 1000")
        dialog.get_by_label("Name").fill("elsewhere")
        dialog.get_by_text("More: priority").click()
        dialog.get_by_label("Only on").fill("n1")
        dialog.get_by_role("button", name="Add job").click()
        gpu = page.locator("[data-gpu='n1:0']")
        expect(gpu).to_contain_text("elsewhere")
        job_id = gpu.locator("[data-job]").get_attribute("data-job")
        expect(open_log(page, job_id)).to_have_text("n1")
        expect(page.locator("#job")).to_contain_text("n1 · GPU 0")
        cancel(page, job_id)
        expect(page.locator("#job")).to_contain_text("cancelled: killed")
        go_home(page)
        expect(page.locator(f"#ended [data-job={job_id}]")).to_be_visible()
        expect(gpu).to_contain_text("Available")


def test_a_gpu_of_a_node_is_paused(browser, net):
    with visit_net(browser, net) as page:
        gpu = page.locator("[data-gpu='n1:1']")
        gpu.get_by_role("button", name="Pause GPU n1:1").click()
        expect(gpu).to_contain_text("Paused")
        assert [each["place"] for each in net.head.status()["gpu_status"] if each["is_paused"]] == ["n1:1"]
        gpu.get_by_role("button", name="Resume GPU n1:1").click()
        expect(gpu).to_contain_text("Available")


def test_a_node_that_is_cut_off_and_comes_back(browser, net):
    job_id = net.head.wait_started(net.head.add("sleep 1000", node="n1", name="far away"))["id"]
    with visit_net(browser, net, f"#/jobs/{job_id}") as page:
        expect(page.locator("#job")).to_contain_text("n1 · GPU 0")
        net.nodes[0].close_sessions()                   # while the link is up: the head hears of it at once
        net.nodes[0].cut()
        expect(page.locator("#job")).to_contain_text("n1 has not been heard since")
        go_home(page)
        expect(machine(page, "n1")).to_contain_text("unknown since")
        expect(row(page, job_id)).to_contain_text("unknown for 1m")
        net.nodes[0].mend()
        expect(page.get_by_text("unknown")).to_have_count(0)
        net.head.call("DELETE", f"/jobs/{job_id}")
